// Attention beside a conversation: one map, pickers for layer and head, and the matrix of all heads.

import { html, useSignal } from "../../html.js";
import { model, passage } from "../../state.js";
import { HeadPickers, ViewChoice } from "./options.js";
import { LargeMap } from "./large.js";
import { Overview } from "./overview.js";
import { Refusal } from "./refusal.js";
import { failure, useAttention } from "./weights.js";

export function AttentionPanel() {
  const opened = useSignal(model);
  const shown = useSignal(passage);
  const refusal = useSignal(failure);
  useAttention();
  if (!opened?.attention) return html`<p class="muted">This model has no attention maps.</p>`;
  if (!opened.heads.some((count) => count > 0))
    return html`<p class="muted">No layer of this model has an attention map.</p>`;
  if (!shown) return html`<p class="muted">The attention of the answer will appear here.</p>`;
  if (refusal) return html`<${Refusal} text=${refusal} />`;
  return html`<div class="attention-panel">
    <div class="attention-one-head"><${HeadPickers} /><${ViewChoice} /></div>
    <${LargeMap} label="Attention weights of the selected head. Arrow keys move between cells, plus and minus zoom." />
    <${Overview} height=${220} />
  </div>`;
}
