// What the views share: the model, the passage they look at, and the token, layer and head that are selected.

import { signal } from "./html.js";
import * as api from "./api.js";

// {name, models, layers, heads: [number per layer], context, vocabulary, chat, attention}, or null before it is known
export const model = signal(null);

// The error of the whole page, as text, or "".
export const problem = signal("");

// The tokens that the attention and inside views show: {ids: [number], tokens: [text], generated: index of the first
// generated token}, or null. The chat view sets it after every answer.
export const passage = signal(null);

// A head of the model. `row` is a query, `column` a key, both indices into the passage's tokens, or null. Pointing
// at a token sets `row`, at a cell of a map both; `pinned` keeps them until the next click.
export const selection = signal({ layer: 0, head: 0, row: null, column: null, pinned: false });
export const select = (change) => (selection.value = { ...selection.value, ...change });

// The address after "#/", split at "/": ["attention"], ["instruments", "fig.5.9"].
export const route = signal(readRoute());
export const goTo = (...path) => (location.hash = "/" + path.map(encodeURIComponent).join("/"));
addEventListener("hashchange", () => (route.value = readRoute()));

function readRoute() {
  const path = location.hash.replace(/^#\/?/, "").split("/").map(decode);
  return path[0] ? path : ["chat"];
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // a stray % in the address
  }
}

// Opens a model of the server, the first one by default; throws ApiError.
export async function openModel(name) {
  const described = await api.describeModel(name);
  passage.value = null;
  selection.value = { layer: 0, head: 0, row: null, column: null, pinned: false };
  problem.value = "";
  model.value = described;
  document.title = `${described.name} · regard`;
}

// A signal whose value is kept in the browser.
export function stored(key, initial) {
  const kept = signal(read(key) ?? initial);
  kept.subscribe((value) => write(key, value));
  return kept;
}

function read(key) {
  try {
    return JSON.parse(localStorage.getItem(`regard-${key}`));
  } catch {
    return null; // storage is blocked, or what it holds is not ours
  }
}

function write(key, value) {
  try {
    localStorage.setItem(`regard-${key}`, JSON.stringify(value));
  } catch {
    // full or blocked: the page works, but forgets
  }
}
