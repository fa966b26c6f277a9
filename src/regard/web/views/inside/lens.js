// The logit lens: what the head of the model would predict after every layer, at every position.

import * as api from "../../api.js";
import { html, useMemo, useSignal, useState } from "../../html.js";
import { Segments, Slider } from "../../controls.js";
import { passage } from "../../state.js";
import { heat } from "../../draw/colours.js";
import { hasSource } from "../attention/axes.js";
import { visible } from "../../token_text.js";
import { bits, percent } from "../../draw/numbers.js";
import { layerTitle } from "./format.js";
import { Grid, cellHeight } from "./grid.js";
import { Passage } from "./passage.js";
import { useEvents } from "./stream.js";
import { Candidates } from "./candidates.js";

const MEASURES = { top: "its top token", final: "the final token", rank: "rank", entropy: "certainty" };
const WIDTH = 76;

export function LensTab({ model }) {
  const shown = useSignal(passage);
  const [count, setCount] = useState(24);
  const [measure, setMeasure] = useState("top");
  const [point, setPoint] = useState(null);
  const body = shown && lensBody(model, shown, count);
  const { events, running, problem } = useEvents(api.lensEvents, body, shown && `${count} ${shown.ids.join()}`);
  const [first, ...layers] = events;
  return html`
    <p class="inside-lead">
      After every block, the head of the model is applied to the residual stream as if the model ended there. The rows
      show at which depth a prediction arises. Early rows mean little: the head was not trained to read them.
    </p>
    <${Passage} />
    <div class="inside-controls">
      <${Slider} label="Positions, from the end" value=${count} min=${4} max=${128} step=${4} onChange=${setCount} />
      <div class="inside-measure">
        <span class="label">Colour</span>
        <${Segments} label="Colour" value=${measure} choices=${Object.entries(MEASURES)} onChange=${setMeasure} />
      </div>
    </div>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    ${first && !problem && html`<${Layers} ...${{ first, layers, running, measure, point, setPoint }} />`}
    ${!first && running && html`<p class="notice">Reading …</p>`}
  `;
}

// The decoder of an encoder-decoder is read: its encoder has no head.
function lensBody(model, { ids, generated }, count) {
  const source = hasSource(model);
  const sequence = source ? { ids: ids.slice(0, generated), target: ids.slice(generated) } : { ids };
  const length = source ? ids.length - generated + 1 : ids.length;
  return { model: model.name, ...sequence, start: Math.max(0, length - count), stop: length };
}

function Layers({ first, layers, running, measure, point, setPoint }) {
  const [start, stop] = first.positions;
  const columns = useMemo(() => first.tokens.slice(start, stop), [first]);
  const rows = useMemo(() => Array.from({ length: first.layers + 1 }, (_, i) => layerTitle(first.layers - i)), [first]);
  const known = layers.length; // row i is depth `layers - i`, and rows arrive from the last layer down
  const colour = (row, column) => (layers[row] ? heat(shade(layers[row], column, measure), true) : null);
  const place =
    point && layers[point.row] && columns[point.column] !== undefined ? point : { row: 0, column: columns.length - 1 };
  return html`<div class="inside-columns wide">
    <div class="inside-scroll" tabindex="-1">
      <${Grid}
        label=${`Top tokens of ${rows.length} layers at ${columns.length} positions. Arrow keys move between cells.`}
        rows=${rows}
        columns=${columns}
        colour=${colour}
        text=${(row, column) => layers[row]?.top[column][0]}
        cell=${[WIDTH, cellHeight(rows.length)]}
        version=${`${first.ids.length} ${known} ${measure}`}
        point=${place}
        onPoint=${setPoint}
        fromEnd
      />
    </div>
    <${Reading} layer=${layers[place.row]} ...${place} ...${{ rows, columns, start, running, known }} />
  </div>`;
}

function Reading({ layer, row, column, rows, columns, start, running, known }) {
  if (!layer) return html`<section class="panel inside-reading"><p class="muted">Reading …</p></section>`;
  const entries = layer.top[column].map((token, i) => ({ token, probability: layer.probabilities[column][i] }));
  return html`<section class="panel inside-reading" aria-live="polite">
    <h2>${row === 0 ? "After the last block" : rows[row] === "input" ? "Embeddings" : `After ${rows[row]}`}</h2>
    <p class="muted">next token after <code>${visible(columns[column])}</code>, position ${start + column}</p>
    <${Candidates} entries=${entries} />
    <dl class="inside-costs">
      <div><dt>final token</dt><dd
        class="number">${percent(layer.final[column] ?? NaN)}, rank ${layer.rank[column] + 1}</dd></div>
      <div><dt>entropy</dt><dd class="number">${bits(layer.entropy[column] ?? NaN).toFixed(2)} bits</dd></div>
    </dl>
    ${running && html`<p class="muted number">${known} of ${rows.length} layers</p>`}
  </section>`;
}

function shade(layer, column, measure) {
  if (measure === "final") return layer.final[column];
  if (measure === "rank") return 1 - Math.min(1, Math.log10(layer.rank[column] + 1) / 4);
  if (measure === "entropy") return Math.exp(-layer.entropy[column]);
  return layer.probabilities[column][0];
}
