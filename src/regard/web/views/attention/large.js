// The map of the selected head: a heat map, or arcs over the words, with the weight of the pointed cell above it.

import { html, useEffect, useMemo, useRef, useSignal, useState } from "../../html.js";
import { Arcs } from "../../draw/arcs.js";
import { paintCells } from "../../draw/cells.js";
import { HeatMap } from "../../draw/heatmap.js";
import { theme } from "../../draw/theme.js";
import { model, passage, select, selection } from "../../state.js";
import { visible } from "../../token_text.js";
import { bits, percent } from "../../draw/numbers.js";
import { axesOf, isImplied, layerName } from "./axes.js";
import { settings, tokenFilter } from "./settings.js";
import { headMap, loadTile, loadedRow, rowOf, weightAt } from "./weights.js";

const TILE_DELAY = 120; // milliseconds between the last scroll and loading what is on screen
const MIN_TILE_CELL = 1.2; // pixels; smaller cells are shown pooled
const MIN_ARC = 0.04;

export function LargeMap({ label }) {
  const shown = useSignal(settings).view;
  return html`<div class="attention-large">
    <${Readout} arcs=${shown === "arcs"} />
    ${shown === "arcs" ? html`<${ArcView} label=${label} />` : html`<${MapView} label=${label} />`}
  </div>`;
}

// Points at a cell of the map of the axes; a pinned one stays.
function pointer(axes) {
  const place = (row, column) => ({
    row: row === null ? null : row + axes.firstRow,
    column: column === null || column === undefined ? null : column + axes.firstColumn,
  });
  return {
    point: (row, column, byKey = false) => {
      if (byKey || !selection.value.pinned) select({ ...place(row, column), pinned: byKey && selection.value.pinned });
    },
    pin: (row, column) => {
      const cell = place(row, column);
      const same = selection.value.pinned && cell.row === selection.value.row && cell.column === selection.value.column;
      select({ ...cell, pinned: !same && row !== null });
    },
  };
}

// The axes and the map of the selected head, or null while they are loaded.
function useMap() {
  const map = useSignal(headMap);
  const shown = useSignal(passage);
  const layer = map?.layer;
  const axes = useMemo(() => {
    if (layer === undefined || !shown) return null;
    const found = axesOf(model.value, shown, layer);
    const rows = found.rows.map(visible);
    return { ...found, rows, columns: found.columns === found.rows ? rows : found.columns.map(visible) };
  }, [layer, shown]);
  return [map, axes];
}

// What a drawing of the head depends on, and the references of its element and of the drawing.
function useDrawing() {
  const [map, axes] = useMap();
  const [shown, filter, colours] = [useSignal(settings), useSignal(tokenFilter), useSignal(theme)];
  return { frame: useRef(), drawing: useRef(), map, axes, shown, filter, colours };
}

function MapView({ label }) {
  const { frame, drawing, map, axes, shown, filter, colours } = useDrawing();
  useEffect(() => {
    let timer = 0;
    let abort = () => {};
    const heatmap = new HeatMap(frame.current, {
      point: (...cell) => heatmap.pointer?.point(...cell),
      pin: (...cell) => heatmap.pointer?.pin(...cell),
      view: (rows, columns, cell) => {
        clearTimeout(timer);
        const current = headMap.value;
        if (!current || current.pool === 1 || cell < MIN_TILE_CELL) return;
        timer = setTimeout(() => {
          abort();
          abort = loadTile(current, rows, columns);
        }, TILE_DELAY);
      },
    });
    drawing.current = heatmap;
    const stop = () => {
      clearTimeout(timer);
      abort();
    };
    const ended = headMap.subscribe(stop); // a tile of the map before is not needed
    return () => {
      ended();
      stop();
      heatmap.remove();
    };
  }, []);
  useEffect(() => {
    const heatmap = drawing.current;
    if (!map || !axes) return;
    heatmap.pointer = pointer(axes);
    heatmap.show({
      rows: axes.rows,
      columns: axes.columns,
      images: paint(map, axes, shown, filter),
      bars: entropyBars(map),
    });
  }, [map, axes, shown, filter, colours]);
  useEffect(() => {
    if (!axes) return;
    return selection.subscribe(({ row, column }) => {
      const within = (index, first, labels) =>
        index !== null && index - first >= 0 && index - first < labels.length ? index - first : null;
      drawing.current.mark(within(row, axes.firstRow, axes.rows), within(column, axes.firstColumn, axes.columns));
    });
  }, [axes]);
  return html`<${Frame} frame=${frame} label=${label} loaded=${Boolean(map)} />
    <div class="attention-zoom" role="group" aria-label="Zoom">
      <button class="icon-button" aria-label="Zoom out" title="Zoom out"
        onClick=${() => drawing.current.zoom(1 / 1.6)}>−</button>
      <button class="icon-button" aria-label="Zoom in" title="Zoom in"
        onClick=${() => drawing.current.zoom(1.6)}>+</button>
      <button class="quiet" onClick=${() => drawing.current.fit()}>Whole map</button>
    </div>`;
}

function Frame({ frame, label, loaded }) {
  return html`<div class="attention-frame" ref=${frame} aria-busy=${!loaded}>
    <div><canvas class="attention-map" tabindex="0" role="img" aria-label=${label}></canvas></div>
  </div>`;
}

// The images of the map: pooled or whole, and the part on screen if it is loaded.
function paint(map, axes, shown, filter) {
  const { layer, rows, columns, pool, tile } = map;
  const signed = isImplied(model.value.attention_layers[layer]);
  const options = { ...shown, signed, largest: largestOf(map, shown.hideFirst), matches: matchesOf(axes, filter) };
  if (signed && shown.scale === "absolute") options.scale = "map";
  const whole = { ...map, rows: [0, rows], columns: [0, columns] };
  const images = [{ image: paintCells(whole, options), pool, row: 0, column: 0 }];
  if (tile)
    images.push({
      image: paintCells({ ...tile, pool: 1 }, options),
      pool: 1,
      row: tile.rows[0],
      column: tile.columns[0],
    });
  return images;
}

function largestOf({ peak, first }, hideFirst) {
  let largest = 0;
  for (let i = 0; i < peak.length; i++) largest = Math.max(largest, peak[i], hideFirst ? 0 : Math.abs(first[i]));
  return largest || 1;
}

function matchesOf({ rows, columns }, filter) {
  if (!filter) return null;
  const text = visible(filter).toLowerCase();
  const find = (labels) => Uint8Array.from(labels, (label) => label.toLowerCase().includes(text));
  return { rows: find(rows), columns: find(columns) };
}

// The entropy of each row, relative to that of uniform weights over all keys.
function entropyBars({ entropy, columns }) {
  const most = Math.log(Math.max(columns, 2));
  return Float32Array.from(entropy, (value) => Math.min(1, value / most));
}

function ArcView({ label }) {
  const { frame, drawing, map, axes, shown, filter, colours } = useDrawing();
  const loaded = useSignal(loadedRow);
  const [row, setRow] = useState(null);
  useEffect(() => selection.subscribe((selected) => setRow(selected.row)), []);
  useEffect(() => {
    const arcs = new Arcs(frame.current, {
      point: (index, byKey) => arcs.pointer?.point(index, null, byKey),
      pin: (index) => arcs.pointer?.pin(index, null),
    });
    drawing.current = arcs;
    return () => arcs.remove();
  }, []);
  const arcs = useMemo(() => (map && axes ? strongest(map, axes, shown, filter) : []), [map, axes, shown, filter]);
  useEffect(() => {
    if (!map || !axes) return;
    const index = row === null ? null : row - axes.firstRow;
    const inside = index !== null && index >= 0 && index < map.rows;
    drawing.current.pointer = pointer(axes);
    const ofRow = inside ? arcsOfRow(map, index, shown) : null;
    drawing.current.show({ rows: axes.rows, columns: axes.columns, arcs, ofRow });
    drawing.current.mark(inside ? index : null);
  }, [map, axes, arcs, row, loaded, colours]);
  return html`<${Frame} frame=${frame} label=${label} loaded=${Boolean(map)} />
    ${
      map?.pool > 1 &&
      row === null &&
      html`<p class="muted">Point at a word to see its arcs: the passage is too long for all of them.</p>`
    }`;
}

function arcsOfRow(map, row, { hideFirst, threshold }) {
  const weights = rowOf(map, row);
  if (!weights) return null;
  const arcs = [];
  weights.forEach((weight, column) => {
    if (Math.abs(weight) > Math.max(threshold, 0.005) && !(hideFirst && column === 0)) arcs.push([row, column, weight]);
  });
  return arcs;
}

// The arcs of all rows, if their weights are loaded.
function strongest(map, axes, { hideFirst, threshold }, filter) {
  if (map.pool > 1) return [];
  const matches = matchesOf(axes, filter);
  const least = Math.max(threshold, MIN_ARC);
  const arcs = [];
  for (let i = 0; i < map.weights.length; i++) {
    const weight = map.weights[i];
    if (Math.abs(weight) < least) continue;
    const [row, column] = [Math.floor(i / map.columns), i % map.columns];
    if ((hideFirst && column === 0) || (matches && !matches.rows[row] && !matches.columns[column])) continue;
    arcs.push([row, column, weight]);
  }
  return arcs.sort((a, b) => Math.abs(b[2]) - Math.abs(a[2]));
}

// The pointed cell in words. It stays after a tap or click.
function Readout({ arcs }) {
  const { row, column, pinned } = useSignal(selection);
  const [map, axes] = useMap();
  useSignal(loadedRow);
  if (!map || !axes) return html`<p class="attention-readout" aria-live="polite">Computing …</p>`;
  const write = isImplied(model.value.attention_layers[map.layer]) ? (value) => value.toPrecision(3) : percent;
  const name = `${layerName(model.value.attention_layers[map.layer])}, head ${map.head}`;
  const index = row === null ? -1 : row - axes.firstRow;
  if (index < 0 || index >= map.rows) {
    return html`<p class="attention-readout" aria-live="polite">
      <b>${name}</b>${" "}
      <span class="muted">
        ${
          arcs
            ? "arcs join a query and the keys that it attends to"
            : "rows are queries, columns the keys that they attend to"
        }
      </span>
    </p>`;
  }
  const key = column === null ? -1 : column - axes.firstColumn;
  const weight = key < 0 || key >= map.columns ? null : weightAt(map, index, key);
  const written = weight === null ? "…" : write(weight);
  const entropy = `${bits(map.entropy[index]).toFixed(2)} bits`;
  return html`<p class="attention-readout" aria-live="polite">
    <code>${axes.rows[index]}</code> at ${index}
    ${
      key >= 0 && key < map.columns
        ? html` attends to <code>${axes.columns[key]}</code> at ${key} with <b>${written}</b>`
        : null
    }
    <span class="muted"> · entropy of the row ${entropy}${pinned ? " · pinned" : ""}</span>
  </p>`;
}
