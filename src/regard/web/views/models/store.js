// The models of the server and those that it can load, polled while the view is open or a model is being loaded.

import * as api from "../../api.js";
import { signal } from "../../html.js";
import { poll } from "../../poll.js";
import { model, openModel } from "../../state.js";

const ACTIVE = 700; // milliseconds between two requests while a model is loaded
const IDLE = 10_000;

// {served, available, loading, adapters, choices, may_load}, or null before it is known
export const listed = signal(null);
export const failure = signal("");

export async function refresh() {
  try {
    listed.value = await api.listModels();
    failure.value = "";
    await updateHeader(listed.value.served);
  } catch (error) {
    if (!(error instanceof api.ApiError)) throw error;
    const fixed = error.status === 404 && !listed.value;
    failure.value = fixed ? "This server's models are fixed: it loads no others." : error.message;
  }
  return listed.value;
}

// The header names the models of the server. If the opened one was removed, the first takes its place.
async function updateHeader(served) {
  const names = served.flatMap((each) => [each.model, ...each.adapters]);
  if (!model.value || names.join("\n") === model.value.models.join("\n")) return;
  if (names.includes(model.value.name)) model.value = { ...model.value, models: names };
  else await openModel(names[0]);
}

// Runs a change, then shows its result; what fails is shown as `failure`.
export async function change(call) {
  let message = "";
  try {
    await call();
  } catch (error) {
    message = error.message;
  }
  await refresh();
  if (message) failure.value = message;
}

// The name under which a model is served, which is loaded if it is not. `matches` finds it among those available.
export async function ensureLoaded(matches) {
  const found = (await api.listModels()).available.find(matches);
  if (!found) throw new api.ApiError("The server does not list this model any more.", 404, "model_not_found");
  if (found.served_as) return found.served_as;
  await api.loadModel(found.model);
  for (;;) {
    const { loading } = await api.listModels();
    if (loading?.model !== found.model || loading.state === "failed") {
      throw new api.ApiError(loading?.error ?? "Another model is being loaded.", 409, "busy");
    }
    if (loading.state === "done") return loading.name;
    await new Promise((resolve) => setTimeout(resolve, ACTIVE));
  }
}

// Asks for the list until the returned function is called.
export const watch = () =>
  poll(refresh, listed, () => (listed.value?.loading?.state === "running" ? ACTIVE : IDLE));
