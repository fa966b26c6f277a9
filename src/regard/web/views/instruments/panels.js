// The panels of an instrument: each kind that the server sends, and the component that draws it.

import { classes, html } from "../../html.js";
import { visible } from "../../token_text.js";
import { Bars } from "./bars.js";
import { Diagram } from "./diagram.js";
import { Equation } from "../../equation.js";
import { format } from "../../draw/numbers.js";
import { Heatmap } from "./heatmap.js";
import { Lines } from "./lines.js";
import { Pictures } from "./pictures.js";
import { Scatter } from "./scatter.js";

const KINDS = {
  numbers: Numbers,
  table: Table,
  heatmap: Heatmap,
  lines: Lines,
  bars: Bars,
  tokens: Tokens,
  diagram: Diagram,
  scatter: Scatter,
  pictures: Pictures,
  equation: PartEquation,
};

// instrument: its id
export function Panel({ instrument, panel, onPick }) {
  const Drawing = KINDS[panel.kind];
  return html`<section
    class=${classes("panel instrument-panel", isWide(panel) && "wide", `instrument-${panel.kind}`)}
    aria-label=${panel.title || "Numbers"}
  >
    ${panel.title && html`<h3>${panel.title}</h3>`}
    <${Drawing} instrument=${instrument} panel=${panel} onPick=${(index) => onPick(panel.sets ?? panel.place, index)} />
  </section>`;
}

// Nodes side by side need the whole width of the panels.
function isWide({ kind, nodes, wide }) {
  if (kind !== "diagram") return kind === "table" || wide;
  return Math.max(...nodes.map(({ y }) => nodes.filter((other) => Math.abs(other.y - y) < 0.01).length)) > 5;
}

function Numbers({ panel }) {
  return html`<dl>
    ${panel.items.map(
      ({ label, value }) =>
        html`<div key=${label}>
          <dt>${label}</dt>
          <dd class=${classes("number", format(value).length > 16 && "long")}>${format(value)}</dd>
        </div>`,
    )}
  </dl>`;
}

function Table({ panel }) {
  return html`<div class="instrument-scroll" tabindex="0" role="group" aria-label=${`Table: ${panel.title}`}>
    <table>
      <thead>
        <tr>
          ${panel.columns.map(
            (column, i) =>
              html`<th key=${i} scope="col">${column || html`<span class="visually-hidden">row</span>`}</th>`,
          )}
        </tr>
      </thead>
      <tbody>
        ${panel.rows.map(
          (row, i) =>
            html`<tr key=${i}>
              ${row.map((cell, j) => html`<td key=${j}>${format(cell)}</td>`)}
            </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}

// Pieces of text, tinted by their value; a click selects one.
function Tokens({ panel, onPick }) {
  return html`<ul class="instrument-pieces">
    ${panel.pieces.map((piece, i) => {
      const share = Math.round(100 * Math.min(1, Math.max(0, panel.values[i])));
      const style = { background: `color-mix(in srgb, var(--highlight) ${0.45 * share}%, transparent)` };
      const text = html`<span class="instrument-piece" style=${style}
        >${visible(piece)}</span
      >`;
      return html`<li key=${i}>
        ${
          panel.sets
            ? html`<button class="instrument-token" aria-pressed=${i === panel.selected} onClick=${() => onPick(i)}>
                ${text}
              </button>`
            : text
        }
        ${panel.notes[i] && html`<span class="instrument-note">${panel.notes[i]}</span>`}
      </li>`;
    })}
  </ul>`;
}

function PartEquation({ instrument, panel }) {
  const id = `${instrument}/${panel.name}`;
  return html`<${Equation} view="instruments" id=${id} className="instrument-formula" label=${panel.title} reserved />`;
}
