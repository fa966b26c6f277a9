// The passage that the lens reads, as text.

import { html } from "../../html.js";
import { PassageBar } from "../../passage_form.js";

export const Passage = () => html`<${PassageBar}
  action="Read it"
  draw=${(shown, edit) => html`<div class="inside-passage">
    <p tabindex="0" role="group" aria-label="Passage">${shown.tokens.join("")}</p>
    <button onClick=${edit}>Edit</button>
  </div>`}
/>`;
