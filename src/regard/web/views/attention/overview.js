// All heads at once: a matrix of layers and heads on one canvas, each head a thumbnail of its map with the letters of
// its labels. One tab stop; the arrow keys move between heads.

import { html, useEffect, useRef, useSignal, useState } from "../../html.js";
import { css, table } from "../../draw/colours.js";
import { theme } from "../../draw/theme.js";
import { model, select } from "../../state.js";
import { bits } from "../../draw/numbers.js";
import { useWidth } from "../../draw/width.js";
import { isImplied, layerName, shortLayerName } from "./axes.js";
import { useSelectedHead } from "./selected_head.js";
import { KINDS, kindFilter, settings } from "./settings.js";
import { labels, labelsOf, overview } from "./weights.js";

const [MARGIN, GAP] = [30, 3]; // pixels: width of the layers' names, space between heads
const [MIN_CELL, MAX_CELL] = [20, 96];

export function Overview({ height }) {
  const [frame, width] = useWidth(0); // 0 until it is measured
  const canvas = useRef();
  const state = useRef({});
  const found = useSignal(overview);
  const labelled = useSignal(labels);
  const { order, hideFirst, linear } = useSignal(settings);
  const kind = useSignal(kindFilter);
  const colours = useSignal(theme);
  const [pointed, setPointed] = useState(null);
  const { layer, head } = useSelectedHead();
  const opened = useSignal(model);
  const heads = listHeads(opened, found, labelled, order, kind);
  const grid = arrange(opened, heads, order, width, height);
  useEffect(() => {
    state.current = { grid, heads };
    if (width) draw(canvas.current, grid, opened, found, labelled, kind, { hideFirst, linear, order });
  }, [opened, found, labelled, order, kind, hideFirst, linear, colours, width, height]);
  useEffect(() => {
    const place = grid.places.get(`${layer}.${head}`);
    if (place) scrollTo(frame.current, place.y, grid.cell);
  }, [layer, head]);
  const at = (event) => placeAt(state.current.grid, event.offsetX, event.offsetY);
  const choose = (place) => place && select({ layer: place.layer, head: place.head });
  const move = (event) => {
    const next = neighbour(state.current.grid, layer, head, event.key);
    if (!next) return;
    event.preventDefault();
    choose(next);
  };
  const shown = pointed ?? { layer, head };
  return html`<div class="attention-overview-part">
    <div class="attention-overview" ref=${frame}>
      <canvas
        ref=${canvas}
        class="attention-heads"
        tabindex="0"
        role="img"
        aria-label=${`Maps of all heads. ${describe(opened, found, labelled, layer, head)}. Arrow keys select a head.`}
        onPointerMove=${(event) => setPointed(at(event))}
        onPointerLeave=${() => setPointed(null)}
        onClick=${(event) => choose(at(event))}
        onKeyDown=${move}
      ></canvas>
      <${Outline} place=${grid.places.get(`${layer}.${head}`)} cell=${grid.cell} name="selected" />
      ${pointed && html`<${Outline} place=${pointed} cell=${grid.cell} name="pointed" />`}
    </div>
    <p class="attention-head-name">${describe(opened, found, labelled, shown.layer, shown.head)}</p>
  </div>`;
}

const Outline = ({ place, cell, name }) =>
  place &&
  html`<div
    class=${`attention-outline ${name}`}
    style=${{ left: `${place.x - 2}px`, top: `${place.y - 2}px`, width: `${cell + 4}px`, height: `${cell + 4}px` }}
  ></div>`;

function describe(opened, found, labelled, layer, head) {
  const entropy = found?.layers[layer]?.entropy[head];
  const parts = [`${layerName(opened.attention_layers[layer])}, head ${head}`];
  if (entropy !== undefined) parts.push(`mean entropy ${bits(entropy).toFixed(2)} bits`);
  for (const [kind, score] of labelsOf(labelled, layer, head)) parts.push(`${kind} ${score.toFixed(2)}`);
  return parts.join(" · ");
}

// The heads by layer, or by entropy, the lowest first. By entropy, a kind leaves only the heads with its label; by
// layer, the others are drawn faintly.
function listHeads(opened, found, labelled, order, kind) {
  const heads = opened.heads.flatMap((count, layer) => Array.from({ length: count }, (_, head) => ({ layer, head })));
  if (order === "layers") return heads;
  const entropy = ({ layer, head }) => found?.layers[layer]?.entropy[head] ?? Infinity;
  const matching = kind ? heads.filter(({ layer, head }) => hasKind(labelled, layer, head, kind)) : heads;
  return matching.sort((a, b) => entropy(a) - entropy(b));
}

const hasKind = (labelled, layer, head, kind) => labelsOf(labelled, layer, head).some(([name]) => name === kind);

// Where each head is drawn: {cell, width, height, places: Map of "layer.head" to {layer, head, x, y, row, column}}.
function arrange(opened, heads, order, width, height) {
  const byLayers = order === "layers";
  const most = Math.max(...opened.heads, 1);
  const margin = byLayers ? MARGIN : 0;
  const space = Math.max(0, width - margin);
  const lines = (cell) => (byLayers ? opened.heads.length : Math.ceil(heads.length / columnsOf(cell)));
  const columnsOf = (cell) => Math.max(1, Math.floor((space + GAP) / (cell + GAP)));
  const limit = byLayers ? Math.floor((space + GAP) / most) - GAP : MAX_CELL;
  let cell = Math.min(MAX_CELL, limit);
  while (cell > MIN_CELL && lines(cell) * (cell + GAP) > height) cell -= 1;
  cell = Math.max(cell, Math.min(limit, MIN_CELL), 6);
  const columns = byLayers ? most : columnsOf(cell);
  const places = new Map();
  heads.forEach(({ layer, head }, i) => {
    const [row, column] = byLayers ? [layer, head] : [Math.floor(i / columns), i % columns];
    const [x, y] = [margin + column * (cell + GAP) + 3, row * (cell + GAP) + 3];
    places.set(`${layer}.${head}`, { layer, head, row, column, x, y });
  });
  return { cell, places, byLayers, margin, height: lines(cell) * (cell + GAP) + 6, width };
}

function placeAt(grid, x, y) {
  for (const place of grid?.places.values() ?? []) {
    if (x >= place.x && y >= place.y && x < place.x + grid.cell + GAP && y < place.y + grid.cell + GAP) return place;
  }
  return null;
}

// The nearest head in the direction of an arrow key.
function neighbour(grid, layer, head, key) {
  const [down, across] = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[key] ?? [0, 0];
  const from = grid.places.get(`${layer}.${head}`) ?? grid.places.values().next().value;
  if ((!down && !across) || !from) return null;
  let best = null;
  for (const place of grid.places.values()) {
    const [rows, columns] = [place.row - from.row, place.column - from.column];
    const ahead = down ? rows * down : columns * across;
    const aside = Math.abs(down ? columns : rows);
    if (ahead <= 0 || (across && aside)) continue;
    const distance = ahead * 100 + aside;
    if (!best || distance < best.distance) best = { place, distance };
  }
  return best?.place;
}

function scrollTo(frame, y, cell) {
  if (y < frame.scrollTop) frame.scrollTop = y - 6;
  else if (y + cell > frame.scrollTop + frame.clientHeight) frame.scrollTop = y + cell + 6 - frame.clientHeight;
}

function draw(canvas, grid, opened, found, labelled, kind, options) {
  const ratio = window.devicePixelRatio || 1;
  [canvas.width, canvas.height] = [grid.width * ratio, grid.height * ratio];
  [canvas.style.width, canvas.style.height] = [`${grid.width}px`, `${grid.height}px`];
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  const family = getComputedStyle(document.documentElement).getPropertyValue("--sans");
  context.textBaseline = "middle";
  if (grid.byLayers) drawLayerNames(context, grid, opened, family);
  for (const place of grid.places.values()) {
    const layer = found?.layers[place.layer];
    context.globalAlpha = kind && !hasKind(labelled, place.layer, place.head, kind) ? 0.15 : 1;
    context.fillStyle = css("--subtle");
    context.fillRect(place.x, place.y, grid.cell, grid.cell);
    if (layer) {
      const signed = isImplied(opened.attention_layers[place.layer]);
      const image = thumbnail(layer, place.head, { ...options, signed });
      context.imageSmoothingEnabled = grid.cell < Math.max(layer.rows, layer.columns);
      context.drawImage(image, place.x, place.y, grid.cell, grid.cell);
    }
    labelsOf(labelled, place.layer, place.head).forEach(([name], i) =>
      drawBadge(context, grid, place, name, i, family),
    );
  }
  context.globalAlpha = 1;
}

function drawLayerNames(context, grid, opened, family) {
  context.font = `11px ${family}`;
  opened.attention_layers.forEach((layer, i) => {
    const y = i * (grid.cell + GAP) + 3 + grid.cell / 2;
    context.fillStyle = css("--muted");
    context.textAlign = "right";
    context.fillText(shortLayerName(layer), MARGIN - 6, y);
    if (opened.heads[i]) return;
    context.textAlign = "left";
    const names = layer.mixers.map(({ name }) => name).join(", ") || "no attention";
    context.fillText(`${names}: no map`, MARGIN + 6, y);
  });
}

// The kinds of a head as letters in a corner, or as dots where heads are small.
function drawBadge(context, grid, { x, y }, name, index, family) {
  const { letter, colour } = KINDS[name] ?? { letter: "?", colour: "--muted" };
  const size = grid.cell >= 30 ? 13 : grid.cell >= 16 ? 6 : 4;
  const [left, top] = [x + grid.cell - (size + 1) * (index + 1), y + 1];
  context.fillStyle = css(colour);
  context.beginPath();
  context.roundRect(left, top, size, size, size / 3);
  context.fill();
  if (size < 10) return;
  context.fillStyle = css("--surface");
  context.font = `700 9.5px ${family}`;
  context.textAlign = "center";
  context.fillText(letter, left + size / 2, top + size / 2 + 0.5);
}

const scratch = document.createElement("canvas");

// The pixels of the server are square roots of weights relative to the largest one of the head.
function thumbnail({ rows, columns, pixels, second }, head, { hideFirst, linear, signed }) {
  [scratch.width, scratch.height] = [columns, rows];
  const context = scratch.getContext("2d", { willReadFrequently: true });
  const image = context.createImageData(columns, rows);
  const target = new Uint32Array(image.data.buffer);
  const colours = table({ signed, linear: true });
  const [start, size] = [head * rows * columns, rows * columns];
  let most = 1; // without the first token the largest weight is another one
  const value = (i) => (hideFirst && i % columns === 0 ? second[head * rows + i / columns] : pixels[start + i]);
  for (let i = 0; i < size; i++) most = Math.max(most, signed ? 2 * Math.abs(value(i) - 128) : value(i));
  for (let i = 0; i < size; i++) {
    const root = signed ? (value(i) - 128) / (most / 2) : value(i) / most;
    if (root === 0) continue; // transparent
    const shown = linear ? Math.sign(root) * root * root : root;
    target[i] = colours[Math.round(signed ? 127.5 * (1 + shown) : 255 * shown)];
  }
  context.putImageData(image, 0, 0);
  return scratch;
}
