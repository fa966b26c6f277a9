// Bars: one row per label, so that long labels stay readable. Values may be negative.

import { classes, html } from "../../html.js";
import { format } from "../../draw/numbers.js";

export function Bars({ panel, onPick }) {
  const { labels, values, unit, sets, selected, digits } = panel;
  const low = Math.min(0, ...values);
  const range = Math.max(0, ...values) - low || 1;
  const zero = (-100 * low) / range;
  return html`<ul class="instrument-bar-list">
    ${labels.map((label, i) => {
      const size = (100 * Math.abs(values[i])) / range;
      const style = { left: `${values[i] < 0 ? zero - size : zero}%`, width: `${size}%` };
      const value = `${format(values[i], digits)}${unit && ` ${unit}`}`;
      const bar = html`<span class="instrument-bar-label">${label}</span>
        <span class="instrument-bar-track"
          ><span class=${classes("instrument-bar", values[i] < 0 && "negative")} style=${style}></span
        ></span>
        <span class="instrument-bar-value number">${value}</span>`;
      return html`<li key=${i} class=${classes(i === selected && "selected")}>
        ${
          sets
            ? html`<button class="instrument-bar-row" aria-pressed=${i === selected} onClick=${() => onPick(i)}>
                ${bar}
              </button>`
            : html`<div class="instrument-bar-row">${bar}</div>`
        }
      </li>`;
    })}
  </ul>`;
}
