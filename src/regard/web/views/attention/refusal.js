// Why there are no maps, with a button that asks for them again.

import { html } from "../../html.js";
import { retry } from "./weights.js";

export const Refusal = ({ text }) => html`<p class="problem attention-refusal" role="alert">
  ${text} <button type="button" onClick=${retry}>Try again</button>
</p>`;
