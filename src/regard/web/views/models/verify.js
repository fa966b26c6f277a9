// `regard verify` from the page: the laws that every model obeys, tested in float64 and float32, with progress.

import * as api from "../../api.js";
import { html, useEffect, useSignal, useState } from "../../html.js";
import { Choice } from "../../controls.js";
import { listed } from "./store.js";

const WAIT = 700; // milliseconds between two questions for the progress

export function Verify() {
  const { available, choices, may_load: mayLoad } = useSignal(listed);
  const stored = available.filter((each) => each.installed && !each.problem).map((each) => each.model);
  const [name, setName] = useState(stored[0] ?? choices.recipes[0]);
  const [{ work, table }, setState] = useState({ work: null, table: null });
  const [error, setError] = useState("");
  const running = work?.state === "running";
  const ask = () => api.verification().then(setState, (failed) => setError(failed.message));
  useEffect(() => void ask(), []);
  useEffect(() => {
    if (!running) return undefined;
    const timer = setInterval(ask, WAIT);
    return () => clearInterval(timer);
  }, [running]);
  const act = async (call) => {
    setError("");
    await call().catch((failed) => setError(failed.message));
    await ask();
  };
  return html`<section class="panel models-verify" aria-labelledby="models-verify">
    <h2 id="models-verify">Verify</h2>
    <p class="models-hint">
      Laws that hold for every model, whatever its parts. Cached = whole: token by token with a cache gives the logits
      of one forward over the sequence. Batched = alone: a row of a padded batch gives the logits of the sequence by
      itself. Packed = separate: documents packed into one row give the logits of each by itself. A recipe is tested
      with random weights.
    </p>
    ${
      mayLoad &&
      html`<div class="models-form">
      <${Choice} label="Model" value=${name} choices=${[...stored, ...choices.recipes]} onChange=${setName} />
      ${
        running
          ? html`<button type="button" onClick=${() => act(api.stopVerifying)}>Stop</button>`
          : html`<button type="button" class="primary"
            onClick=${() => act(() => api.verifyModel(name))}>Verify</button>`
      }
    </div>`
    }
    ${running && html`<${Progress} work=${work} />`}
    ${work?.state === "failed" && html`<p class="problem" role="alert">${work.model}: ${work.error}</p>`}
    ${error && html`<p class="problem" role="alert">${error}</p>`}
    ${table && html`<${Laws} table=${table} />`}
  </section>`;
}

function Progress({ work }) {
  return html`<progress
    class="models-progress"
    max=${work.total ?? 1}
    value=${work.total ? work.done : null}
    aria-label="Laws tested"
  ></progress>
    <p class="models-hint" role="status">${work.now || `${work.model} is being loaded …`}</p>`;
}

const CLASSES = { pass: "models-good", FAIL: "models-error" };

function Laws({ table }) {
  const passed = table.rows.filter(([, result]) => result === "pass").length;
  return html`<p class="models-conditions">
      <b>${table.model}</b>: ${table.ok ? `all laws that apply hold (${passed})` : "some laws do not hold"}, in
      sequences of ${table.length} tokens. The numbers are the largest differences.
    </p>
    <div class="models-scroll" tabindex="0" role="region" aria-label="Table of laws">
      <table class="models-table">
        <thead>
          <tr>
            <th scope="col">Law</th>
            <th scope="col">Result</th>
            <th scope="col" class="models-right">float64</th>
            <th scope="col" class="models-right">float32</th>
          </tr>
        </thead>
        <tbody>
          ${table.rows.map(
            ([law, result, float64, float32, note]) => html`<tr key=${law}>
              <th scope="row">${law}${note && html`<span class="models-what">${note}</span>`}</th>
              <td class=${CLASSES[result] ?? "muted"}>${result}</td>
              <td class="models-right">${float64}</td>
              <td class="models-right">${float32}</td>
            </tr>`,
          )}
        </tbody>
      </table>
    </div>
    ${table.notes.map((note) => html`<p class="models-hint">${note}</p>`)}`;
}
