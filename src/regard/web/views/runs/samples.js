// What a run generated during training: one sample per evaluation, chosen by a slider of the step.

import * as api from "../../api.js";
import { html, useEffect, useSignal, useState } from "../../html.js";
import { Choice, Slider } from "../../controls.js";
import { chosen, compared, listed } from "./store.js";

export function Samples() {
  const runs = compared(useSignal(listed), useSignal(chosen));
  const [name, setName] = useState(null);
  const run = runs.find((each) => each.run === name) ?? runs[0];
  const [found, setFound] = useState({ run: null, samples: [] });
  const [position, setPosition] = useState(null); // null: the newest
  useEffect(() => {
    if (!run) return undefined;
    const request = new AbortController();
    api.runSamples(run.run, request.signal).then(
      ({ samples }) => setFound({ run: run.run, samples }),
      () => {}, // the list of runs reports what fails
    );
    return () => request.abort();
  }, [run?.run, run?.held_out_loss, run?.stage]);
  const samples = found.run === run?.run ? found.samples : [];
  if (!samples.length) return null;
  const index = Math.min(position ?? samples.length - 1, samples.length - 1);
  const { step, text } = samples[index];
  const previous = index > 0 ? samples[index - 1].text : "";
  const same = sharedPrefix(previous, text);
  const choose = (value) => setPosition(value === samples.length - 1 ? null : value);
  return html`<section class="panel runs-samples" aria-labelledby="runs-samples">
    <div class="runs-head">
      <h2 id="runs-samples">What it writes</h2>
      ${runs.length > 1 &&
      html`<${Choice} label="Run" value=${run.run} choices=${runs.map((each) => each.run)} onChange=${setName} />`}
    </div>
    ${samples.length > 1 &&
    html`<${Slider}
      label="After step"
      value=${index}
      min=${0}
      max=${samples.length - 1}
      format=${(value) => (samples[value]?.step ?? step).toLocaleString("en")}
      onChange=${choose}
    />`}
    <p class="runs-sample">${text.slice(0, same)}<mark>${text.slice(same)}</mark></p>
    <p class="runs-hint">
      The model continues a text that it was not trained on, always with its most probable token.
      ${index > 0 ? " Marked: what differs from the sample before." : ""}
    </p>
  </section>`;
}

// The number of characters that both begin with, up to the end of a word.
function sharedPrefix(a, b) {
  let length = 0;
  while (length < a.length && length < b.length && a[length] === b[length]) length++;
  return length === b.length ? length : b.lastIndexOf(" ", length) + 1;
}
