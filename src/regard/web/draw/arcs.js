// Attention as arcs between words: from the query, above the line, to its keys. If the keys are other words (those of
// a source), they are in a line of their own on top. The larger a weight, relative to the largest of the map (or of the
// marked row), the wider and darker its arc.

import { css } from "./colours.js";
import { ScrollCanvas, clip } from "./scroll_canvas.js";

const MIN_SPACING = 17; // pixels between two words
const MAX_SPACING = 78;
const LABELS = 92; // height of the words
const [RISE, SLOPE] = [20, 0.62]; // the control points of an arc are so high, in pixels and per pixel of its width
const MAX_ARCS = 1500; // the strongest in view

export class Arcs {
  // on: {point(row), pin(row)}
  constructor(frame, on) {
    this.on = on;
    this.surface = new ScrollCanvas(frame, (context, view) => this.draw(context, view));
    this.surface.onResize = () => this.layout();
    const { canvas } = this.surface;
    const byMouse = (act) => (event) => event.pointerType !== "touch" && act(event);
    canvas.addEventListener("pointermove", byMouse((event) => this.on.point(this.wordAt(event))));
    canvas.addEventListener("pointerleave", byMouse(() => this.on.point(null)));
    canvas.addEventListener("click", (event) => this.on.pin(this.wordAt(event)));
    canvas.addEventListener("keydown", (event) => this.key(event));
    this.row = null;
  }

  // rows, columns: words, the same array if a sequence attends to itself. arcs: [[row, column, weight]],
  // the strongest first. ofRow: the arcs of the marked row, or null.
  show({ rows, columns, arcs, ofRow }) {
    Object.assign(this, { rows, columns, arcs, ofRow });
    this.layout();
  }

  get crossed() {
    return this.rows !== this.columns;
  }

  layout() {
    if (!this.rows) return;
    const count = Math.max(this.rows.length, this.columns.length);
    const { width, height } = this.surface.view;
    this.spacing = Math.min(MAX_SPACING, Math.max(MIN_SPACING, (width - 40) / count));
    this.surface.setSize(Math.max(width, this.spacing * count + 40), height);
    this.surface.redraw();
  }

  wordAt({ offsetX }) {
    if (!this.rows) return null;
    const row = Math.round((offsetX + this.surface.view.left - 20) / this.spacing - 0.5);
    return row >= 0 && row < this.rows.length ? row : null;
  }

  mark(row) {
    this.row = row;
    this.surface.redraw();
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Enter" || event.key === " ") this.on.pin(this.row);
    else if (event.key === "Escape") this.on.pin(null);
    else if (!step || !this.rows) return;
    else {
      const row = Math.min(Math.max((this.row ?? -1) + step, 0), this.rows.length - 1);
      this.on.point(row, true);
      const { width, left } = this.surface.view;
      const at = row * this.spacing + 20;
      this.surface.frame.scrollLeft = Math.min(Math.max(left, at + 40 - width), at - 40);
    }
    event.preventDefault();
  }

  x = (index) => 20 + (index + 0.5) * this.spacing - this.surface.view.left;

  draw(context, { width, height }) {
    if (!this.rows) return;
    const top = this.crossed ? LABELS : 8;
    const bottom = this.baseline(top, height);
    const inView = (index) => this.x(index) > -40 && this.x(index) < width + 40;
    const faded = this.row !== null;
    const most = this.arcs.length ? Math.abs(this.arcs[0][2]) : 1;
    let drawn = 0;
    for (const [row, column, weight] of this.arcs) {
      if (drawn >= MAX_ARCS) break;
      if (row === this.row || !(inView(row) || inView(column))) continue;
      drawn += 1;
      this.arc(context, row, column, weight / most, top, bottom, faded ? 0.1 : 0.75);
    }
    const mostOfRow = (this.ofRow ?? []).reduce((largest, [, , weight]) => Math.max(largest, Math.abs(weight)), 1e-9);
    for (const [row, column, weight] of this.ofRow ?? []) {
      this.arc(context, row, column, weight / mostOfRow, top, bottom, 1);
    }
    const keys = new Map((this.ofRow ?? []).map(([, column, weight]) => [column, weight]));
    this.words(context, this.rows, bottom, inView, keys, false);
    if (this.crossed) this.words(context, this.columns, top, inView, keys, true);
  }

  // The height of the words: in the middle if the widest possible arc leaves room above it.
  baseline(top, height) {
    const lowest = height - LABELS;
    if (this.crossed) return lowest;
    const peak = 0.75 * (RISE + SLOPE * this.spacing * (this.rows.length - 1)); // of a Bezier curve: 3/4 of its rise
    return Math.min(lowest, top + peak + Math.max(0, lowest - top - peak) / 2);
  }

  arc(context, row, column, weight, top, bottom, alpha) {
    const [from, to] = [this.x(row), this.x(column)];
    const size = Math.abs(weight);
    context.strokeStyle = css(weight < 0 ? "--series-1" : "--accent");
    context.globalAlpha = alpha * Math.min(1, 0.15 + 0.85 * size);
    context.lineWidth = 0.6 + 3.6 * size;
    context.beginPath();
    context.moveTo(from, bottom);
    if (this.crossed) context.bezierCurveTo(from, (top + bottom) / 2, to, (top + bottom) / 2, to, top);
    else if (row === column) context.ellipse(from, bottom - 7, 4, 7, 0, Math.PI / 2, Math.PI * 2.5);
    else {
      const rise = Math.min((bottom - top) * 1.28, RISE + Math.abs(from - to) * SLOPE);
      context.bezierCurveTo(from, bottom - rise, to, bottom - rise, to, bottom);
    }
    context.stroke();
    context.globalAlpha = 1;
  }

  words(context, words, y, inView, keys, above) {
    const mono = getComputedStyle(document.documentElement).getPropertyValue("--mono");
    context.textBaseline = "middle";
    words.forEach((word, i) => {
      if (!inView(i)) return;
      const marked = (!above && i === this.row) || ((above || !this.crossed) && (keys.get(i) ?? 0) > 0.05);
      context.font = `${marked ? 600 : 400} 12px ${mono}`;
      context.fillStyle = css(!above && i === this.row ? "--accent" : marked ? "--text" : "--muted");
      context.save();
      context.translate(this.x(i), above ? y - 8 : y + 8);
      context.rotate(above ? -Math.PI / 2.6 : Math.PI / 2.6);
      context.textAlign = "left";
      context.fillText(clip(context, word, LABELS - 8), 0, 0);
      context.restore();
    });
  }

  remove() {
    this.surface.remove();
  }
}
