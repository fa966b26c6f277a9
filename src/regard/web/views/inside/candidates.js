// Next tokens with their probabilities as bars.

import { html } from "../../html.js";
import { visible } from "../../token_text.js";
import { percent } from "../../draw/numbers.js";

export const Candidates = ({ entries, marked }) => html`<ul class="inside-candidates">
  ${entries.map(
    ({ token, probability }, i) => html`<li key=${i} class=${token === marked ? "marked" : ""}>
      <code>${visible(token)}</code><span class="inside-bar" aria-hidden="true"><i
        style=${{ width: `${100 * probability}%` }}></i></span>
      <span class="number">${percent(probability)}</span>
    </li>`,
  )}
</ul>`;
