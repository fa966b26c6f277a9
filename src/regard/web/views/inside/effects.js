// The effects of patched cells as a grid that fills row by row, and the answer with one cell patched.

import * as api from "../../api.js";
import { html, useEffect, useMemo, useState } from "../../html.js";
import { diverging } from "../../draw/colours.js";
import { Candidates } from "./candidates.js";
import { visible } from "../../token_text.js";
import { layerTitle } from "./format.js";
import { Grid, cellHeight } from "./grid.js";

export function Effects({ body, events, running }) {
  const [start, ...found] = events;
  const [point, setPoint] = useState(null);
  const [cell, setCell] = useState(null);
  const depth = start.names.length - 1;
  const rows = useMemo(() => start.names.map((_, i) => layerTitle(depth - i)), [start]);
  const columns = useMemo(() => labels(start), [start]);
  const at = (row, column) => found[depth - row]?.effects[column]; // the input is computed first, and drawn last
  const width = Math.max(20, Math.min(48, Math.floor(720 / columns.length)));
  const place = point ?? { row: depth, column: firstDifference(start) };
  const effect = at(place.row, place.column);
  return html`<div class="inside-columns wide">
    <div class="inside-scroll" tabindex="-1">
      <${Grid}
        label=${`Effects of ${columns.length} positions in ${rows.length} layers. Arrows move, Enter patches a cell.`}
        rows=${rows}
        columns=${columns}
        colour=${(row, column) => (at(row, column) === undefined ? null : diverging(at(row, column)))}
        text=${(row, column) => (Math.abs(at(row, column)) >= 0.05 && width >= 34 ? at(row, column).toFixed(2) : "")}
        cell=${[width, cellHeight(rows.length)]}
        version=${`${found.length} ${columns.length}`}
        point=${place}
        onPoint=${setPoint}
        onPick=${(picked) => (setPoint(picked), setCell({ layer: depth - picked.row, position: picked.column }))}
      />
    </div>
    <section class="panel inside-reading">
      <p aria-live="polite">
        <b class="number">${effect === undefined ? "…" : (effect ?? NaN).toFixed(2)}</b>
        <span class="muted"> ${place.row === depth ? "input" : `after ${rows[place.row]}`}, at </span>
          <code>${visible(columns[place.column])}</code>
      </p>
      <p class="inside-scale" aria-hidden="true"><span>worse</span><i></i><span>1: clean answer</span></p>
      ${running && html`<p class="muted number">${found.length} of ${rows.length} layers</p>`}
      <${Answer} title="Clean" entries=${start.clean_top} marked=${start.answer} />
      <${Answer} title="Corrupted" entries=${start.corrupted_top} marked=${start.answer} />
      ${
        cell
          ? html`<${Patched} body=${body} cell=${cell} answer=${start.answer} />`
          : html`<p class="muted">Click a cell to see the answer with it.</p>`
      }
    </section>
  </div>`;
}

// The token of both prompts, or both tokens.
const labels = ({ tokens, corrupted_tokens: others }) =>
  tokens.map((token, i) => (token === others[i] ? token : `${token}/${others[i]}`));
const firstDifference = ({ tokens, corrupted_tokens: others }) =>
  Math.max(
    0,
    tokens.findIndex((token, i) => token !== others[i]),
  );

const Answer = ({ title, entries, marked }) =>
  html`<h2>${title}</h2><${Candidates} entries=${entries} marked=${marked} />`;

function Patched({ body, cell, answer }) {
  const [found, setFound] = useState(null);
  const [refusal, setRefusal] = useState("");
  useEffect(() => {
    const stop = new AbortController();
    const load = async () => {
      for await (const event of api.patchEvents({ ...body, ...cell }, stop.signal)) setFound({ ...cell, event });
    };
    setRefusal("");
    load().catch((error) => stop.signal.aborted || setRefusal(error.message));
    return () => stop.abort();
  }, [cell.layer, cell.position]);
  if (refusal) return html`<p class="problem" role="alert">${refusal}</p>`;
  if (found?.layer !== cell.layer || found.position !== cell.position)
    return html`<h2>Patched</h2><p class="muted">Running …</p>`;
  const part = cell.layer === 0 ? "the input" : layerTitle(cell.layer);
  const title = `Corrupted, with ${part} at ${visible(found.event.tokens[cell.position])} from clean`;
  return html`<div class="inside-patched" role="status"><${Answer} title=${title} entries=${found.event.patched_top}
    marked=${answer} /></div>`;
}
