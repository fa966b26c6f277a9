// The attention view: the passage, all heads as a matrix, and the selected head large beside it.

import { html, useEffect, useRef, useSignal, useState } from "../../html.js";
import { model, passage } from "../../state.js";
import { HeadFacts, HeadFilters, MapOptions, ViewChoice } from "./options.js";
import { LargeMap } from "./large.js";
import { Overview } from "./overview.js";
import { Passage } from "./passage.js";
import { Refusal } from "./refusal.js";
import { failure, useAttention } from "./weights.js";

export default function View() {
  const opened = useSignal(model);
  const shown = useSignal(passage);
  if (!opened) return null;
  if (!opened.attention || !opened.heads.some((count) => count > 0)) return html`<${NoMaps} opened=${opened} />`;
  return html`<div class="attention-view">
    <${Passage} />
    ${shown && html`<${Maps} />`}
  </div>`;
}

const THUMBNAIL_QUERIES = 256; // the server computes the thumbnails of so many at most

function Maps() {
  useAttention();
  const length = useSignal(passage)?.ids.length ?? 0;
  const refusal = useSignal(failure);
  if (refusal) return html`<${Refusal} text=${refusal} />`;
  return html`<div class="attention-columns">
    <section class="panel attention-all" aria-labelledby="attention-all-title">
      <h2 id="attention-all-title">All heads</h2>
      <${HeadFilters} />
      ${
        length > THUMBNAIL_QUERIES &&
        html`<p class="muted attention-hint">
        Thumbnails and mean entropies are of at most ${THUMBNAIL_QUERIES} evenly spaced queries.
      </p>`
      }
      <${FittedOverview} />
    </section>
    <section class="panel attention-one" aria-labelledby="attention-one-title">
      <div class="attention-one-head">
        <h2 id="attention-one-title">Selected head</h2>
        <${ViewChoice} />
      </div>
      <div class="attention-one-body">
        <${LargeMap}
          label="Attention weights of the selected head. Arrow keys move between cells, plus and minus zoom." />
        <div class="attention-side">
          <${HeadFacts} />
          <${MapOptions} />
        </div>
      </div>
    </section>
  </div>`;
}

// The matrix of heads with the height that is left for it.
function FittedOverview() {
  const frame = useRef();
  const [height, setHeight] = useState(500);
  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => setHeight(Math.max(160, entry.contentRect.height - 30)));
    observer.observe(frame.current);
    return () => observer.disconnect();
  }, []);
  return html`<div class="attention-fitted" ref=${frame}><${Overview} height=${height} /></div>`;
}

function NoMaps({ opened }) {
  const reasons = opened.attention_layers.flatMap(({ mixers }) => mixers).filter(({ reason }) => reason);
  return html`<div class="notice">
    <p>${opened.attention ? "No layer of this model has an attention map." : "This model has no attention maps."}</p>
    ${[...new Map(reasons.map((mixer) => [mixer.name, mixer]))].map(
      ([name, { reason }]) => html`<p key=${name}><b>${name}</b>: ${reason}</p>`,
    )}
  </div>`;
}
