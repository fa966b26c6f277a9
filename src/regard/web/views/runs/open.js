// "Open this model": loads a trained run into the server, then opens the chat with it.

import { html, useSignal, useState } from "../../html.js";
import { goTo, model, openModel } from "../../state.js";
import { ensureLoaded } from "../models/store.js";

export function OpenModel({ name }) {
  const opened = useSignal(model);
  const [state, setState] = useState({ busy: false, error: "" });
  const open = async () => {
    setState({ busy: true, error: "" });
    try {
      await openModel(await ensureLoaded((each) => each.run === name));
      goTo("chat");
    } catch (error) {
      setState({ busy: false, error: error.message });
    }
  };
  return html`<div class="runs-open">
    <button type="button" class="primary" disabled=${state.busy || !opened} onClick=${open}>
      ${state.busy ? "Loading …" : "Open this model"}
    </button>
    ${state.error && html`<p class="problem" role="alert">${state.error}</p>`}
  </div>`;
}
