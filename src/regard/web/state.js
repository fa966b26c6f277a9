// What the views share: the model, the passage that they show, the selected token, layer and head, the address, and
// values that are kept in the browser.

import { signal } from "./html.js";
import * as api from "./api.js";
import { local } from "./storage.js";

// {name, models, layers, heads: [number per layer], context, vocabulary, chat, generates, source, attention,
// attention_layers: [{stack, index, mixers}], head_labels}, or null before it is known
export const model = signal(null);

// The error of the whole page, as text, or "".
export const problem = signal("");

// The tokens that the attention and inside views show: {ids: [number], tokens: [text], generated: index of the first
// generated token, example: true if nobody has typed it}, or null. The chat view sets it after every answer.
export const passage = signal(null);

// A head of the model. `row` is a query, `column` a key, both indices into the passage's tokens, or null. Pointing
// at a token sets `row`, at a cell of a map both; `pinned` keeps them until the next click.
export const selection = signal({ layer: 0, head: 0, row: null, column: null, pinned: false });
export const select = (change) => (selection.value = { ...selection.value, ...change });

// The address after "#/", split at "/": ["attention"], ["instruments", "masks"].
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

let opening = 0;

// Opens a model of the server, the first one by default, and keeps its name in the address; throws ApiError. If it is
// called again before the server has answered, only the last call counts.
export async function openModel(name) {
  const call = ++opening;
  let described;
  try {
    described = await api.describeModel(name);
  } catch (error) {
    if (call === opening) throw error;
  }
  if (call !== opening) return;
  passage.value = null;
  selection.value = { layer: 0, head: 0, row: null, column: null, pinned: false };
  problem.value = "";
  model.value = described;
  document.title = `${described.name} · regard`;
  if (name || location.search) {
    history.replaceState(null, "", `?model=${encodeURIComponent(described.name)}${location.hash}`);
  }
}

// A signal whose value is kept in the browser. It is of the type of `initial`, and has its fields if that is an object:
// another version of the page may have kept something else.
export function stored(key, initial) {
  const kept = signal(fitting(read(key), initial));
  kept.subscribe((value) => local.write(`regard-${key}`, JSON.stringify(value)));
  return kept;
}

function fitting(value, initial) {
  if (value === null || initial === null) return value ?? initial;
  if (typeof value !== typeof initial || Array.isArray(value)) return initial;
  if (typeof value !== "object") return value;
  const usable = ([name, field]) => !Object.hasOwn(initial, name) || typeof field === typeof initial[name];
  return { ...initial, ...Object.fromEntries(Object.entries(value).filter(usable)) };
}

function read(key) {
  try {
    return JSON.parse(local.read(`regard-${key}`));
  } catch {
    return null; // what it holds is not ours
  }
}
