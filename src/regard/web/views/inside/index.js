// Inside: the model drawn from its spec, the logit lens, the norms of the residual stream, and activation patching.

import { html, useSignal } from "../../html.js";
import { Segments } from "../../controls.js";
import { goTo, model } from "../../state.js";
import { ModelTab } from "./model.js";
import { LensTab } from "./lens.js";
import { NormsTab } from "./norms.js";
import { PatchingTab } from "./patching.js";

const TABS = {
  model: ["Model", ModelTab],
  lens: ["Logit lens", LensTab],
  norms: ["Norms", NormsTab],
  patching: ["Patching", PatchingTab],
};

export default function View({ path }) {
  const opened = useSignal(model);
  const tab = Object.hasOwn(TABS, path[0]) ? path[0] : "model";
  if (!opened) return html`<p class="notice">Waiting for the model …</p>`;
  const Tab = TABS[tab][1];
  return html`<div class="inside page-width">
    <${Segments}
      label="Part of the view"
      value=${tab}
      choices=${Object.entries(TABS).map(([id, [title]]) => [id, title])}
      onChange=${(id) => goTo("inside", id)}
    />
    <${Tab} key=${`${tab} ${opened.name}`} model=${opened} />
  </div>`;
}
