// A heat map with labelled rows and columns, which zooms and scrolls. The cells are images (draw/cells.js) whose pixels
// are squares of `pool` cells, the later images on top of the earlier ones.

import { css } from "./colours.js";
import { drawColumnLabels, drawRowLabels } from "./axis_labels.js";
import { ScrollCanvas } from "./scroll_canvas.js";

const MAX_CELL = 34; // pixels
const MIN_LABEL = 9; // pixels between two labels
const SIDE = 34; // width of the bars beside the rows
const ZOOM = 1.4;

export class HeatMap {
  // on: {point(row, column) (null outside), pin(row, column), view(rows, columns, cell)}
  constructor(frame, on) {
    this.on = on;
    this.surface = new ScrollCanvas(frame, (context, view) => this.draw(context, view));
    this.surface.onResize = () => this.fitted && this.fit();
    const { canvas } = this.surface;
    const byMouse = (act) => (event) => event.pointerType !== "touch" && act(event);
    canvas.addEventListener("pointermove", byMouse((event) => this.on.point(...this.cellAt(event))));
    canvas.addEventListener("pointerleave", byMouse(() => this.on.point(null, null)));
    canvas.addEventListener("click", (event) => this.on.pin(...this.cellAt(event)));
    canvas.addEventListener("keydown", (event) => this.key(event));
    frame.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    [this.row, this.column, this.fitted, this.cell] = [null, null, true, 8];
  }

  // rows, columns: labels; images: [{image, pool, row, column}]; bars: null, or a number from 0 to 1 for each row
  show({ rows, columns, images, bars }) {
    const resized = rows !== this.rows || columns !== this.columns;
    Object.assign(this, { rows, columns, images, bars });
    this.background = null;
    if (resized) this.measure();
    if (resized || this.fitted) this.fit();
    this.surface.redraw();
  }

  measure() {
    const context = this.surface.canvas.getContext("2d");
    context.font = this.font(12);
    const longest = (labels) =>
      labels.slice(0, 300).reduce((most, label) => Math.max(most, context.measureText(label.slice(0, 20)).width), 20);
    const most = Math.min(96, this.surface.view.width / 5);
    [this.left, this.top] = [this.rows, this.columns].map((labels) => Math.min(most, longest(labels)) + 10);
  }

  font = (size) => `${size}px ${getComputedStyle(document.documentElement).getPropertyValue("--mono")}`;
  get side() {
    return this.bars ? SIDE : 0;
  }

  // The size of a cell with which the whole map is in view.
  get fitting() {
    const { width, height } = this.surface.view;
    const across = (width - this.left - this.side - 2) / this.columns.length;
    const down = (height - this.top - 2) / this.rows.length;
    return Math.min(MAX_CELL, Math.max(0.05, Math.min(across, down)));
  }

  fit() {
    if (!this.rows) return;
    this.fitted = true;
    this.resize(this.fitting);
  }

  resize(cell) {
    this.cell = cell;
    const { rows, columns, left, top } = this;
    this.surface.setSize(left + cell * columns.length + this.side, top + cell * rows.length + 1);
    this.surface.redraw();
  }

  // Zooms by a factor, keeping the cell at a place of the view, by default its middle.
  zoom(factor, x = null, y = null) {
    const { width, height, left, top } = this.surface.view;
    [x, y] = [x ?? (this.left + width) / 2, y ?? (this.top + height) / 2];
    const cell = Math.min(MAX_CELL, Math.max(this.fitting, this.cell * factor));
    const [column, row] = [(left + x - this.left) / this.cell, (top + y - this.top) / this.cell];
    this.fitted = cell <= this.fitting * 1.001;
    this.resize(cell);
    this.surface.frame.scrollTo(column * cell + this.left - x, row * cell + this.top - y);
  }

  wheel(event) {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    this.zoom(Math.exp(-event.deltaY / 200), event.offsetX, event.offsetY);
  }

  cellAt({ offsetX, offsetY }) {
    const { left, top, width } = this.surface.view;
    if (!this.rows || offsetX < this.left || offsetY < this.top || offsetX > width - this.side) return [null, null];
    const row = Math.floor((offsetY + top - this.top) / this.cell);
    const column = Math.floor((offsetX + left - this.left) / this.cell);
    return row < this.rows.length && column < this.columns.length ? [row, column] : [null, null];
  }

  // Marks a row and a column; null: none.
  mark(row, column) {
    if (row === this.row && column === this.column) return;
    [this.row, this.column] = [row, column];
    this.surface.redraw();
  }

  key(event) {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!this.rows) return;
    if (move) this.step(move);
    else if (event.key === "+" || event.key === "=") this.zoom(ZOOM);
    else if (event.key === "-") this.zoom(1 / ZOOM);
    else if (event.key === "0") this.fit();
    else if (event.key === "Enter" || event.key === " ") this.on.pin(this.row, this.column);
    else if (event.key === "Escape") this.on.pin(null, null);
    else return;
    event.preventDefault();
  }

  step([down, across]) {
    const within = (i, labels) => Math.min(Math.max(i, 0), labels.length - 1);
    const row = within((this.row ?? -1) + down, this.rows);
    const column = within((this.column ?? -1) + across, this.columns);
    this.on.point(row, column, true);
    this.reveal(row, column);
  }

  reveal(row, column) {
    const { width, height, left, top } = this.surface.view;
    const inside = (at, start, span) => Math.min(Math.max(start, at + this.cell - span), at);
    this.surface.frame.scrollTo(
      inside(column * this.cell, left, width - this.left - this.side),
      inside(row * this.cell, top, height - this.top),
    );
  }

  // Pointing at cells changes only the marks, so that everything else is drawn once for a view.
  draw(context, view) {
    if (!this.rows) return;
    const key = [view.left, view.top, view.width, view.height, this.cell, window.devicePixelRatio].join();
    if (this.background?.key !== key) this.background = { key, image: this.drawBackground(view) };
    context.drawImage(this.background.image, 0, 0, view.width, view.height);
    const [x, y] = [this.left - view.left, this.top - view.top]; // of the first cell
    this.inside(context, view, () => this.drawMarks(context, x, y));
    this.drawLabels(context, x, y, one(this.row), one(this.column), true);
  }

  drawBackground(view) {
    const image = document.createElement("canvas");
    const { canvas } = this.surface;
    [image.width, image.height] = [canvas.width, canvas.height];
    const context = image.getContext("2d");
    context.scale(canvas.width / view.width, canvas.height / view.height);
    const [x, y] = [this.left - view.left, this.top - view.top]; // of the first cell
    const across = visible(view.left, view.width - this.left - this.side, this.cell, this.columns.length);
    const down = visible(view.top, view.height - this.top, this.cell, this.rows.length);
    this.inside(context, view, () => this.drawCells(context, x, y, down, across));
    this.drawLabels(context, x, y, this.every(down), this.every(across), false);
    const end = Math.min(view.width - this.side, x + this.cell * this.columns.length);
    if (this.bars) this.drawBars(context, end, y, down);
    this.on.view(down, across, this.cell);
    return image;
  }

  // Draws within the area of the cells.
  inside(context, view, draw) {
    context.save();
    context.beginPath();
    const [width, height] = [view.width - this.left - this.side, view.height - this.top];
    context.rect(this.left, this.top, Math.max(0, width), Math.max(0, height));
    context.clip();
    draw();
    context.restore();
  }

  // The indices of a range whose labels have room.
  every([first, end]) {
    const step = Math.ceil(MIN_LABEL / this.cell);
    const start = Math.ceil(first / step) * step;
    return Array.from({ length: Math.max(0, Math.ceil((end - start) / step)) }, (_, i) => start + i * step);
  }

  drawCells(context, x, y, down, across) {
    context.fillStyle = css("--heat-0");
    context.fillRect(x, y, this.cell * this.columns.length, this.cell * this.rows.length);
    for (const { image, pool, row, column } of this.images) {
      // cells of the image that are in view; the last pixel may stand for fewer than `pool` cells
      const [c0, c1] = clamp(across, column, image.width, pool);
      const [r0, r1] = clamp(down, row, image.height, pool);
      if (c1 <= c0 || r1 <= r0) continue;
      const size = this.cell * pool;
      context.imageSmoothingEnabled = size < 1;
      context.drawImage(
        image,
        ...[c0, r0, c1 - c0, r1 - r0],
        ...[x + column * this.cell + c0 * size, y + row * this.cell + r0 * size, (c1 - c0) * size, (r1 - r0) * size],
      );
    }
  }

  drawMarks(context, x, y) {
    const { row, column, cell } = this;
    context.fillStyle = context.strokeStyle = css("--highlight");
    context.globalAlpha = 0.22;
    const size = Math.max(cell, 2);
    if (row !== null) context.fillRect(x, y + row * cell, cell * this.columns.length, size);
    if (column !== null) context.fillRect(x + column * cell, y, size, cell * this.rows.length);
    context.globalAlpha = 1;
    if (row === null || column === null) return;
    context.lineWidth = 2;
    context.strokeRect(x + column * cell, y + row * cell, size, size);
  }

  drawLabels(context, x, y, rows, columns, marked) {
    const { left, top, cell } = this;
    context.font = this.font(Math.max(9, Math.min(cell - 3, 12)));
    drawRowLabels(context, rows.map((i) => [this.rows[i], y + (i + 0.5) * cell]), left, top, marked);
    drawColumnLabels(context, columns.map((i) => [this.columns[i], x + (i + 0.5) * cell]), left, top, marked);
  }

  drawBars(context, x, y, [first, end]) {
    context.fillStyle = css("--series-2");
    context.globalAlpha = 0.75;
    context.save();
    context.beginPath();
    context.rect(x, this.top, SIDE, this.surface.view.height);
    context.clip();
    const height = Math.max(this.cell - (this.cell > 4 ? 1 : 0), 0.5);
    for (let i = first; i < end; i++) context.fillRect(x + 4, y + i * this.cell, (SIDE - 6) * this.bars[i], height);
    context.restore();
    context.globalAlpha = 1;
  }

  remove() {
    this.surface.remove();
  }
}

// The range [first, end) of cells that a view shows.
const visible = (offset, span, cell, count) => [
  Math.max(0, Math.floor(offset / cell)),
  Math.min(count, Math.ceil((offset + span) / cell)),
];

// The pixels of an image that begins at cell `start`, within a range of cells.
const clamp = ([first, end], start, pixels, pool) => [
  Math.max(0, Math.floor((first - start) / pool)),
  Math.min(pixels, Math.ceil((end - start) / pool)),
];

const one = (index) => (index === null ? [] : [index]);
