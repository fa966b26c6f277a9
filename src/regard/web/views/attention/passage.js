// The passage of the attention view: its words, tinted by weights.

import { html } from "../../html.js";
import { PassageBar } from "../../passage_form.js";
import { Words } from "./words.js";

export const Passage = () => html`<${PassageBar}
  action="Show attention"
  draw=${(shown, edit) => html`<section class="attention-passage" aria-label="Passage">
    <${Words} />
    <p class="attention-passage-facts">
      <span class="muted number">
        ${shown.example ? "an example · " : ""}${shown.ids.length.toLocaleString("en")} tokens
      </span>
      <button onClick=${edit}>Edit</button>
    </p>
  </section>`}
/>`;
