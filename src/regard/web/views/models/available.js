// The available models: packages, runs and folders that the server can load.

import * as api from "../../api.js";
import { html, useSignal } from "../../html.js";
import { bytes, compact } from "../../draw/numbers.js";
import { change, listed } from "./store.js";

export function Available() {
  const { available, loading, may_load: mayLoad } = useSignal(listed);
  return html`<section class="panel" aria-labelledby="models-available">
    <h2 id="models-available">Available</h2>
    <div class="models-scroll" tabindex="0" role="region" aria-label="Table of models">
      <table class="models-table">
        <thead>
          <tr>
            <th scope="col">Model</th>
            <th scope="col" class="models-right">Parameters</th>
            <th scope="col" class="models-right models-wide">On disk</th>
            <th scope="col" class="models-right models-wide">Context</th>
            <th scope="col"><span class="visually-hidden">Action</span></th>
          </tr>
        </thead>
        <tbody>
          ${available.map((each) => html`<${Row}
            key=${each.model}
            stored=${each}
            loading=${loading}
            mayLoad=${mayLoad}
          />`)}
        </tbody>
      </table>
    </div>
    ${!mayLoad &&
    html`<p class="models-hint">
      Other hosts may call this server without a key, so models cannot be loaded from here.
    </p>`}
  </section>`;
}

function Row({ stored, loading, mayLoad }) {
  return html`<tr>
    <th scope="row">
      <span class="models-name">${stored.model}</span>
      <span class="models-what">${stored.what}</span>
      ${stored.problem && html`<span class="models-error">${stored.problem}</span>`}
    </th>
    <td class="models-right">${stored.parameters === null ? "–" : compact(stored.parameters)}</td>
    <td class="models-right models-wide">${stored.bytes === null ? "–" : bytes(stored.bytes)}</td>
    <td class="models-right models-wide">${stored.context === null ? "–" : stored.context.toLocaleString("en")}</td>
    <td class="models-action"><${Action} stored=${stored} loading=${loading} mayLoad=${mayLoad} /></td>
  </tr>`;
}

function Action({ stored, loading, mayLoad }) {
  const busy = loading?.state === "running";
  if (!stored.installed) return html`<code>${stored.remedy}</code>`;
  if (stored.served_as) return html`<span class="models-good">served as ${stored.served_as}</span>`;
  if (busy && loading.model === stored.model) return html`<span role="status">loading …</span>`;
  if (!mayLoad || stored.problem) return null;
  const failed = loading?.state === "failed" && loading.model === stored.model;
  return html`<button
    type="button"
    disabled=${busy}
    aria-label=${`Load ${stored.model}`}
    onClick=${() => change(() => api.loadModel(stored.model))}
  >Load</button>
    ${failed && html`<p class="models-error" role="alert">${loading.error}</p>`}`;
}
