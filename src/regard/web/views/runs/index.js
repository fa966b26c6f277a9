// Training runs: a list to choose from, live curves, samples over time, and the demo.

import { html, useEffect, useSignal } from "../../html.js";
import { Curves } from "./curves.js";
import { Demo } from "./demo.js";
import { RunList } from "./list.js";
import { Samples } from "./samples.js";
import { failure, listed, watch } from "./store.js";

export default function View() {
  const list = useSignal(listed);
  const failed = useSignal(failure);
  useEffect(watch, []);
  if (!list) return html`<p class="notice" role="status">${failed || "Reading the runs …"}</p>`;
  return html`<div class="page-width runs-page">
    ${failed && html`<p class="problem" role="alert">${failed}</p>`}
    <div class="runs-top">
      ${list.runs.length ? html`<${RunList} />` : html`<${Nothing} folder=${list.folder} />`}
      <${Demo} />
    </div>
    ${list.runs.length > 0 && html`<${Curves} /><${Samples} />`}
  </div>`;
}

function Nothing({ folder }) {
  return html`<section class="panel runs-nothing">
    <h2>No runs yet</h2>
    <p>
      This view shows the training runs in the folder <code>${folder}</code>: loss curves while they train, the text
      that the model writes on the way, and every number that is logged.
    </p>
    <p>Start the demo, or train a model of your own: <code>regard train llama</code></p>
  </section>`;
}
