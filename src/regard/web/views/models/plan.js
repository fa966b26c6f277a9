// `regard plan` as a form: the parameters, FLOPs and bytes of any model, before it is built or loaded.

import * as api from "../../api.js";
import { html, useId, useSignal, useState } from "../../html.js";
import { Choice, NumberField } from "../../controls.js";
import { useDelayed } from "../../request_hook.js";
import { listed } from "./store.js";

const DELAY = 250; // milliseconds after the last change

export function Plan() {
  const { available, choices } = useSignal(listed);
  const stored = available.filter((each) => each.installed && !each.problem).map((each) => each.model);
  const known = [...new Set([...stored, ...choices.published, ...choices.recipes])];
  const initial = { model: stored[0] ?? known[0], context: null, batch: 1, dtype: "bfloat16", device: "" };
  const [options, setOptions] = useState(initial);
  const [found, setFound] = useState({ table: null, error: "" });
  const set = (name) => (value) => setOptions((previous) => ({ ...previous, [name]: value }));
  const id = useId();
  const load = (signal) => {
    if (!options.model) return;
    const body = { ...options, batch: options.batch ?? 1, device: options.device || null };
    api.planModel(body, signal).then(
      (table) => setFound({ table, error: "" }),
      (error) => error.name === "AbortError" || setFound(({ table }) => ({ table, error: error.message })),
    );
  };
  useDelayed(DELAY, load, [JSON.stringify(options)]);
  return html`<section class="panel models-plan" aria-labelledby="models-plan">
    <h2 id="models-plan">Plan</h2>
    <p class="models-hint">
      What a model costs, counted from its spec: nothing is built or loaded. Any size works, such as 7B.
    </p>
    <div class="models-form">
      <div class="field">
        <label for=${id}>Model</label>
        <input
          type="text"
          id=${id}
          list=${`${id}-known`}
          value=${options.model}
          onInput=${(event) => set("model")(event.target.value)}
        />
        <datalist id=${`${id}-known`}>
          ${known.map((name) => html`<option key=${name} value=${name}></option>`)}
        </datalist>
      </div>
      <${Choice}
        label="Device"
        value=${options.device}
        choices=${[["", "none"], ...choices.devices.map((name) => [name, name])]}
        onChange=${set("device")}
      />
      <${NumberField} label="Batch" value=${options.batch} min=${1} onChange=${set("batch")} />
      <${NumberField}
        label="Context"
        value=${options.context}
        min=${1}
        placeholder="the model's"
        onChange=${set("context")}
      />
      <${Choice} label="Format" value=${options.dtype} choices=${choices.dtypes} onChange=${set("dtype")} />
    </div>
    ${found.error && html`<p class="problem" role="alert">${found.error}</p>`}
    ${found.table && html`<${Groups} table=${found.table} />`}
  </section>`;
}

// One small table per group of numbers.
function Groups({ table }) {
  const groups = new Map();
  for (const [group, quantity, number] of table.rows) {
    if (!groups.has(group)) groups.set(group, []);
    groups.get(group).push([quantity, number]);
  }
  return html`<p class="models-conditions"><b>${table.model}</b>: ${table.conditions}</p>
    <div class="models-groups">
      ${[...groups].map(
        ([group, rows]) => html`<table key=${group}>
          <caption>${group}</caption>
          <tbody>
            ${rows.map(
              ([quantity, number]) => html`<tr key=${quantity}>
                <th scope="row">${quantity}</th>
                <td class="models-right">${number}</td>
              </tr>`,
            )}
          </tbody>
        </table>`,
      )}
    </div>`;
}
