// Attention weights as colours, on a square-root scale, so that small weights stay visible.

import { visible } from "./tokens.js";

const LABEL = 92; // width of the token labels on each axis, in pixels
const MAX_CELL = 34; // size of a cell, in pixels
const MIN_LABEL_SPACING = 8; // pixels

export function palette() {
  const style = getComputedStyle(document.documentElement);
  const stops = [0, 1, 2].map((i) => style.getPropertyValue(`--heat-${i}`).trim().split(" ").map(Number));
  return (weight) => {
    const t = 2 * Math.sqrt(Math.min(Math.max(weight, 0), 1));
    const [low, high] = t < 1 ? [stops[0], stops[1]] : [stops[1], stops[2]];
    return low.map((c, k) => Math.round(c + (high[k] - c) * (t < 1 ? t : t - 1)));
  };
}

// Draws one pixel per cell; the caller scales the canvas up.
export function paint(canvas, weights, colour = palette()) {
  canvas.width = weights[0].length;
  canvas.height = weights.length;
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  weights.flat().forEach((weight, i) => image.data.set([...colour(weight), 255], 4 * i));
  context.putImageData(image, 0, 0);
}

// The full map of one head: rows are queries, columns are keys.
export class HeatMap {
  constructor(canvas, onCell) {
    this.canvas = canvas;
    this.onCell = onCell;
    this.cells = document.createElement("canvas");
    canvas.addEventListener("pointermove", (event) => this.point(...this.cellAt(event)));
    canvas.addEventListener("pointerdown", (event) => this.point(...this.cellAt(event)));
    canvas.addEventListener("pointerleave", () => this.point(-1, -1));
    canvas.addEventListener("keydown", (event) => this.pointByKey(event));
  }

  show(tokens, weights) {
    this.tokens = tokens.map(visible);
    this.weights = weights;
    [this.row, this.column] = [-1, -1];
    paint(this.cells, weights);
    this.size = Math.min(MAX_CELL, (this.canvas.parentElement.clientWidth - LABEL - 2) / tokens.length);
    const side = Math.ceil(LABEL + this.size * tokens.length + 1);
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = this.canvas.height = side * ratio;
    this.canvas.style.width = this.canvas.style.height = `${side}px`;
    this.canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    this.draw();
  }

  draw() {
    const { size, tokens, row, column } = this;
    const context = this.canvas.getContext("2d");
    const style = getComputedStyle(document.documentElement);
    const [text, muted, accent] = ["--text", "--muted", "--accent"].map((name) => style.getPropertyValue(name).trim());
    const span = size * tokens.length;
    context.clearRect(0, 0, LABEL + span + 1, LABEL + span + 1);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.cells, LABEL, LABEL, span, span);
    context.font = `${Math.max(8, Math.min(size - 2, 12))}px ${style.getPropertyValue("--mono")}`;
    context.textBaseline = "middle";
    const every = Math.ceil(MIN_LABEL_SPACING / size); // small cells: label every n-th token
    tokens.forEach((token, i) => {
      if (i % every && i !== row && i !== column) return;
      const middle = LABEL + (i + 0.5) * size;
      const label = clip(context, token, LABEL - 10);
      context.fillStyle = i === row ? accent : muted;
      context.textAlign = "right";
      context.fillText(label, LABEL - 6, middle);
      context.fillStyle = i === column ? accent : muted;
      context.textAlign = "left";
      context.save();
      context.translate(middle, LABEL - 6);
      context.rotate(-Math.PI / 2);
      context.fillText(label, 0, 0);
      context.restore();
    });
    if (row < 0) return;
    context.strokeStyle = accent;
    context.globalAlpha = 0.35;
    context.strokeRect(LABEL + 0.5, LABEL + row * size + 0.5, span, size);
    context.strokeRect(LABEL + column * size + 0.5, LABEL + 0.5, size, span);
    context.globalAlpha = 1;
    context.strokeStyle = text;
    context.lineWidth = 1.5;
    context.strokeRect(LABEL + column * size, LABEL + row * size, size, size);
  }

  cellAt(event) {
    const cell = (offset) => Math.floor((offset - LABEL) / this.size);
    const [row, column] = [cell(event.offsetY), cell(event.offsetX)];
    const inside = Math.min(row, column) >= 0 && Math.max(row, column) < this.tokens.length;
    return inside ? [row, column] : [-1, -1];
  }

  point(row, column) {
    if (!this.tokens || (row === this.row && column === this.column)) return;
    [this.row, this.column] = [row, column];
    this.draw();
    this.onCell(row, column);
  }

  pointByKey(event) {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!move || !this.tokens) return;
    event.preventDefault();
    const last = this.tokens.length - 1;
    const within = (i) => Math.min(Math.max(i, 0), last);
    this.point(within(this.row + move[0]), within(this.column + move[1]));
  }
}

function clip(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let end = text.length;
  while (end > 1 && context.measureText(`${text.slice(0, end)}…`).width > width) end -= 1;
  return `${text.slice(0, end)}…`;
}
