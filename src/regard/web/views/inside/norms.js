// The norm of the residual stream by layer and position, and its largest activations.

import * as api from "../../api.js";
import { html, useMemo, useSignal, useState } from "../../html.js";
import { Check, Segments } from "../../controls.js";
import { passage } from "../../state.js";
import { heat } from "../../draw/colours.js";
import { hasSource } from "../attention/axes.js";
import { visible } from "../../token_text.js";
import { layerTitle } from "./format.js";
import { Grid, cellHeight } from "./grid.js";
import { Passage } from "./passage.js";
import { useEvents } from "./stream.js";

export function NormsTab({ model }) {
  const shown = useSignal(passage);
  const source = hasSource(model);
  const [side, setSide] = useState("encoder");
  const [hideFirst, setHideFirst] = useState(false);
  const [point, setPoint] = useState(null);
  const body = shown && { model: model.name, logits: false, ...sequence(shown, source, side) };
  const { events, running, problem } = useEvents(api.lensEvents, body, shown && `${side} ${shown.ids.join()}`);
  return html`
    <p class="inside-lead">
      The length of the residual stream, a vector per token, after every block. It grows with depth as blocks add to it.
      A few tokens often carry massive activations: single channels a thousand times larger than the median.
    </p>
    <${Passage} />
    <div class="inside-controls">
      ${
        source &&
        html`<${Segments} label="Stack" value=${side} choices=${[
          ["encoder", "Encoder"],
          ["decoder", "Decoder"],
        ]} onChange=${setSide} />`
      }
      <${Check} label="leave the first token out of the scale" value=${hideFirst} onChange=${setHideFirst} />
    </div>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    ${running && !events[0] && html`<p class="notice">Reading …</p>`}
    ${events[0] && html`<${Norms} found=${events[0]} ...${{ hideFirst, point, setPoint }} />`}
  `;
}

function sequence({ ids, generated }, source, side) {
  if (!source) return { ids };
  return side === "encoder"
    ? { ids: ids.slice(0, generated) }
    : { ids: ids.slice(0, generated), target: ids.slice(generated) };
}

function Norms({ found, hideFirst, point, setPoint }) {
  const { tokens, norms, largest } = found;
  const rows = useMemo(() => norms.map((_, i) => layerTitle(norms.length - 1 - i)), [found]);
  const scale = Math.log1p(Math.max(...norms.flatMap((row) => (hideFirst ? row.slice(1) : row)), 1e-9));
  const at = (row, column) => norms[norms.length - 1 - row][column];
  const width = Math.max(10, Math.min(34, Math.floor(680 / tokens.length)));
  const place =
    point && rows[point.row] !== undefined && tokens[point.column] !== undefined ? point : { row: 0, column: 0 };
  return html`<div class="inside-columns wide">
    <div class="inside-scroll" tabindex="-1">
      <${Grid}
        label=${`Norms of the residual stream of ${tokens.length} tokens in ${rows.length} rows. Arrow keys move.`}
        rows=${rows}
        columns=${tokens}
        colour=${(row, column) => heat(Math.log1p(at(row, column)) / scale, true)}
        cell=${[width, cellHeight(rows.length)]}
        version=${`${found.ids.join()} ${hideFirst} ${rows.length}`}
        point=${place}
        onPoint=${setPoint}
      />
    </div>
    <section class="panel inside-reading">
      <p aria-live="polite">
        <b class="number">${(at(place.row, place.column) ?? NaN).toFixed(2)}</b>
        <span
          class="muted"> norm, ${place.row === rows.length - 1 ? "embeddings" : `after ${rows[place.row]}`}, of </span>
        <code>${visible(tokens[place.column])}</code>
      </p>
      <h2>Largest activations</h2>
      <${Largest} entries=${largest} tokens=${tokens}
        onPoint=${({ layer, position }) => setPoint({ row: norms.length - 1 - layer, column: position })} />
    </section>
  </div>`;
}

// The rows are one tab stop; the arrow keys move between them.
function Largest({ entries, tokens, onPoint }) {
  const [current, setCurrent] = useState(0);
  const choose = (i) => (setCurrent(i), onPoint(entries[i]));
  const move = (event) => {
    const next = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
    if (!next) return;
    event.preventDefault();
    event.target.closest("tr")[next]?.focus();
  };
  const massive = entries.filter((entry) => entry.massive).length;
  const count = massive ? `${massive} of them massive` : "None is massive";
  return html`<p class="muted">${count} (over 100, and over 1,000 times the median).</p>
    <table class="inside-largest">
      <thead><tr><th>token</th><th>layer</th><th>channel</th><th>value</th><th>× median</th></tr></thead>
      <tbody onKeyDown=${move}>
        ${entries.map(
          (entry, i) => html`<tr
            key=${`${entry.position} ${entry.channel}`}
            class=${entry.massive ? "massive" : ""}
            tabindex=${i === Math.min(current, entries.length - 1) ? 0 : -1}
            onPointerEnter=${() => choose(i)}
            onFocus=${() => choose(i)}
          >
            <td><code>${visible(tokens[entry.position])}</code></td>
            <td>${layerTitle(entry.layer)}</td>
            <td class="number">${entry.channel}</td>
            <td class="number">${(entry.value ?? NaN).toFixed(1)}</td>
            <td class="number">${(entry.ratio ?? NaN).toFixed(0)}</td>
          </tr>`,
        )}
      </tbody>
    </table>`;
}
