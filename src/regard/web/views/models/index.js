// Models: what the server has, what it can load, and what models cost and obey.

import { html, useEffect, useSignal } from "../../html.js";
import { Available } from "./available.js";
import { Plan } from "./plan.js";
import { Served } from "./served.js";
import { failure, listed, watch } from "./store.js";
import { Verify } from "./verify.js";

export default function View() {
  const list = useSignal(listed);
  const failed = useSignal(failure);
  useEffect(watch, []);
  if (!list) return html`<p class="notice" role="status">${failed || "Reading the models …"}</p>`;
  return html`<div class="page-width models-page">
    ${failed && html`<p class="problem" role="alert">${failed}</p>`}
    <${Served} />
    <${Available} />
    <${Plan} />
    <${Verify} />
  </div>`;
}
