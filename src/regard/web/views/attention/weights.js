// Attention of the passage: thumbnails of all heads, the map of the selected head, and the weights of the selected
// row. Loaded only while a part of the page shows them. For a long passage the map is pooled, and the part on screen
// is loaded in full.

import * as api from "../../api.js";
import { computed, effect, signal, useEffect } from "../../html.js";
import { model, passage, select, selection } from "../../state.js";
import { axesOf, placeInPassage, sequenceOf } from "./axes.js";
import { kindFilter } from "./settings.js";

const WHOLE = 512; // tokens of which a map is loaded without pooling
const KEPT_MAPS = 24;
const ROW_DELAY = 40; // milliseconds between pointing at a row and loading it

// null, or {of: the passage, layers: [null or {heads, rows, columns, pixels, second, scale, entropy}], complete}
export const overview = signal(null);
// null, or {layer, head, rows, columns, pool, weights, second, peak, first, entropy, tile}: all arrays are flat.
// `tile` is a part without pooling, {rows: [first, end], columns, weights, …}.
export const headMap = signal(null);
// null, or {layer, head, index, weights}: a row of a pooled map. Not a part of headMap, which would be painted again.
export const loadedRow = signal(null);
// null, or the weights of row `selection.row` of the selected head, one for every token of the passage
export const rowWeights = signal(null);
// null, or {threshold, uniform, scores}; why the heads have no labels, or ""
export const labels = signal(null);
export const labelFailure = signal("");
// why there are no maps, or ""; retry() asks for them again
export const failure = signal("");
const attempt = signal(0);
export function retry() {
  failure.value = "";
  attempt.value += 1;
}

const watching = signal(0);
const shownHead = computed(() => `${selection.value.layer}.${selection.value.head}`);
const shownRow = computed(() => selection.value.row);
const maps = new Map(); // of the passage, by layer and head

// A component that calls this shows attention, so that it is loaded.
export function useAttention() {
  useEffect(() => {
    watching.value += 1;
    return () => (watching.value -= 1);
  }, []);
}

const ready = computed(() => Boolean(watching.value && passage.value && model.value?.attention));

// Runs `work(signal)`; the function that is returned aborts it.
function load(work) {
  const control = new AbortController();
  work(control.signal).catch((error) => {
    if (control.signal.aborted || error.name === "AbortError") return;
    if (!(error instanceof api.ApiError)) throw error;
    failure.value = error.message;
  });
  return () => control.abort();
}

effect(() => {
  passage.value; // another passage: nothing of the previous one is shown
  maps.clear();
  [headMap.value, overview.value, loadedRow.value, failure.value] = [null, null, null, ""];
});

effect(() => {
  const { heads = [] } = model.value ?? {};
  const [layer, head] = shownHead.value.split(".").map(Number);
  if (head < (heads[layer] ?? 0)) return;
  if (heads[layer]) select({ head: 0 });
  else if (heads.some((count) => count > 0)) select({ layer: heads.findIndex((count) => count > 0), head: 0 });
});

effect(() => {
  attempt.value;
  const shown = passage.value; // read also if the map is known, so that the effect runs for the next passage
  if (!ready.value) return;
  const [layer, head] = shownHead.value.split(".").map(Number);
  if (!model.value.heads[layer]) return;
  const key = shownHead.value;
  if (maps.has(key)) {
    headMap.value = maps.get(key);
    return;
  }
  failure.value = "";
  return load(async (signal) => {
    const axes = axesOf(model.value, shown, layer);
    const [rows, columns] = [axes.rows.length, axes.columns.length];
    const pool = Math.ceil(Math.max(rows, columns) / WHOLE);
    const part = await api.attentionHead(sequenceOf(model.value, shown), { layer, head, pool }, signal);
    const map = { ...part, layer, head, rows, columns, pool, tile: null };
    if (maps.size >= KEPT_MAPS) maps.delete(maps.keys().next().value);
    maps.set(key, map);
    headMap.value = map;
  });
});

effect(() => {
  attempt.value;
  const of = passage.value;
  const known = overview.peek();
  if (!ready.value || (known?.of === of && known.complete)) return;
  failure.value = "";
  const { heads } = model.value;
  const sequence = sequenceOf(model.value, of);
  const step = Math.max(1, Math.round(1500 / of.ids.length)) * 4; // layers of one request
  return load(async (signal) => {
    const layers = heads.map(() => null);
    for (let first = 0; first < heads.length; first += step) {
      const end = Math.min(first + step, heads.length);
      for (const layer of await api.attentionOverview(sequence, [first, end], signal)) layers[layer.layer] = layer;
      overview.value = { of, layers: [...layers], complete: end === heads.length };
    }
  });
});

let labelled = ""; // the model whose heads the labels are of, or are asked for
const modelName = computed(() => model.value?.name);
effect(() => {
  modelName.value; // another model: its heads have other labels
  labelled = "";
  [labels.value, labelFailure.value, kindFilter.value] = [null, "", null];
});

effect(() => {
  // after the maps: the detectors run the model several times
  if (!overview.value?.complete || !model.value?.head_labels || labelled === model.value.name) return;
  const { name } = model.value;
  labelled = name;
  api.headLabels(name).then(
    (found) => labelled === name && ([labels.value, labelFailure.value] = [found, ""]),
    // the next passage asks again
    (error) => labelled === name && ([labelled, labelFailure.value] = ["", error.message]),
  );
});

// The kinds of a head, [[kind, score], …].
export function labelsOf(found, layer, head) {
  if (!found) return [];
  return Object.entries(found.scores)
    .map(([kind, layers]) => [kind, layers[layer]?.[head] ?? 0])
    .filter(([, score]) => score > found.threshold);
}

// Loads a part of a pooled map without pooling; ranges are [first, end].
export function loadTile(map, rows, columns) {
  if (map.tile && contains(map.tile.rows, rows) && contains(map.tile.columns, columns)) return () => {};
  const { layer, head } = map;
  const key = `${layer}.${head}`;
  return load(async (signal) => {
    const sequence = sequenceOf(model.value, passage.value);
    const part = await api.attentionHead(sequence, { layer, head, rows, columns }, signal);
    if (maps.get(key) !== map) return; // of an earlier passage
    const loaded = { ...map, tile: { ...part, rows, columns } };
    maps.set(key, loaded);
    if (headMap.value === map) headMap.value = loaded;
  });
}

const contains = ([first, end], [a, b]) => first <= a && b <= end;

// The weight of a cell, or null if it is not loaded.
export function weightAt(map, row, column) {
  if (map.pool === 1) return map.weights[row * map.columns + column];
  const whole = rowOf(map, row);
  if (whole) return whole[column];
  const { tile } = map;
  if (!tile || row < tile.rows[0] || row >= tile.rows[1] || column < tile.columns[0] || column >= tile.columns[1])
    return null;
  return tile.weights[(row - tile.rows[0]) * (tile.columns[1] - tile.columns[0]) + column - tile.columns[0]];
}

// All weights of a row of the map, or null if they are not loaded.
export function rowOf(map, row) {
  if (map.pool === 1) return map.weights.subarray(row * map.columns, (row + 1) * map.columns);
  const found = loadedRow.value;
  return found?.index === row && found.layer === map.layer && found.head === map.head ? found.weights : null;
}

effect(() => {
  const map = headMap.value;
  const row = shownRow.value;
  if (!map || row === null || !passage.value) {
    rowWeights.value = null;
    return;
  }
  const axes = axesOf(model.value, passage.value, map.layer);
  const index = row - axes.firstRow;
  if (index < 0 || index >= map.rows) {
    rowWeights.value = null;
    return;
  }
  const found = rowOf(map, index);
  rowWeights.value = found && placeInPassage(found, axes, passage.value.ids.length);
  if (found) return;
  const timer = setTimeout(() => (abort = loadRow(map, index)), ROW_DELAY);
  let abort = () => {};
  return () => {
    clearTimeout(timer);
    abort();
  };
});

function loadRow(map, index) {
  return load(async (signal) => {
    const sequence = sequenceOf(model.value, passage.value);
    const part = await api.attentionHead(
      sequence,
      { layer: map.layer, head: map.head, rows: [index, index + 1] },
      signal,
    );
    loadedRow.value = { layer: map.layer, head: map.head, index, weights: part.weights };
  });
}
