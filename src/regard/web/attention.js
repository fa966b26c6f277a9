// The attention panel: all heads as thumbnails, one of them large.

import * as api from "./api.js";
import { HeatMap, paint } from "./heatmap.js";
import { element, visible } from "./tokens.js";

const get = (id) => document.getElementById(id);
const [layers, heads, readout, frame, legend, grid] = ["layer", "head", "readout", "map-frame", "legend", "grid"].map(get);

export class AttentionPanel {
  constructor(model) {
    this.model = model;
    this.place = { layer: Math.max(0, model.heads.findIndex((count) => count > 0)), head: 0 };
    this.map = new HeatMap(get("map"), (row, column) => this.read(row, column));
    this.running = new AbortController();
    fill(layers, model.heads.map((count, layer) => [layer, count > 0]));
    this.fillHeads();
    layers.addEventListener("change", () => this.choose(Number(layers.value), 0));
    heads.addEventListener("change", () => this.choose(this.place.layer, Number(heads.value)));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.look(this.passage));
    addEventListener("resize", () => this.view && this.map.show(this.view.tokens, this.view.weights));
  }

  fillHeads() {
    fill(heads, Array.from({ length: this.model.heads[this.place.layer] }, (_, head) => [head, true]));
    [layers.value, heads.value] = [this.place.layer, this.place.head];
  }

  clear() {
    this.running.abort();
    this.passage = this.view = null;
    this.reveal(false);
    grid.replaceChildren();
    readout.textContent = "Generate some text to see where each head looks.";
  }

  reveal(yes) {
    for (const part of [frame, legend, get("grid-title")]) part.hidden = !yes;
    get("empty").hidden = yes;
  }

  // Looks at a passage; a newer call overtakes an older one.
  async look(passage) {
    if (!passage) return this.clear();
    this.passage = passage;
    await this.attempt(async (signal) => {
      const { layers: rows } = await api.attention(passage, {}, signal);
      this.drawGrid(rows);
      await this.enlarge(signal);
    });
  }

  async choose(layer, head) {
    this.place = { layer, head };
    this.fillHeads();
    this.markChosen();
    if (this.passage) await this.attempt((signal) => this.enlarge(signal));
  }

  async attempt(work) {
    this.running.abort();
    this.running = new AbortController();
    try {
      await work(this.running.signal);
    } catch (error) {
      if (error.name === "AbortError") return;
      if (!(error instanceof api.ApiError)) throw error;
      this.clear();
      readout.textContent = error.message;
    }
  }

  async enlarge(signal) {
    this.view = await api.attention(this.passage, this.place, signal);
    this.reveal(true);
    this.map.show(this.view.tokens, this.view.weights);
    paint(get("scale"), [Array.from({ length: 160 }, (_, i) => i / 159)]);
    const mean = this.view.entropy.reduce((sum, h) => sum + h, 0) / this.view.entropy.length;
    get("entropy").textContent = `mean entropy ${(mean / Math.LN2).toFixed(2)} bits`;
    this.read(-1, -1);
  }

  read(row, column) {
    const { tokens, weights, layer, head } = this.view;
    if (row < 0) {
      readout.textContent = `Layer ${layer}, head ${head}: each row is a token, its colours where it looks.`;
      return;
    }
    const share = element("b", "", `${(100 * weights[row][column]).toFixed(1)} %`);
    const [from, to] = [row, column].map((i) => element("code", "", visible(tokens[i])));
    readout.replaceChildren(from, ` at ${row} looks at `, to, ` at ${column} with `, share);
  }

  drawGrid(rows) {
    grid.replaceChildren(
      ...rows.map((row, layer) => {
        const line = element("div", "layer-row");
        const boxes = element("div", "heads");
        line.append(element("span", "", `L${layer}`), boxes);
        if (!row) boxes.textContent = "no attention in this layer";
        else boxes.append(...row.thumbnails.map((weights, head) => this.thumbnail(layer, head, weights, row.entropy[head])));
        return line;
      }),
    );
    this.markChosen();
  }

  thumbnail(layer, head, weights, entropy) {
    const button = element("button", "thumb");
    button.type = "button";
    Object.assign(button.dataset, { layer, head });
    const label = `layer ${layer}, head ${head}, mean entropy ${(entropy / Math.LN2).toFixed(2)} bits`;
    button.setAttribute("aria-label", label);
    button.title = label;
    const canvas = document.createElement("canvas");
    paint(canvas, weights);
    button.append(canvas);
    button.addEventListener("click", () => this.choose(layer, head));
    return button;
  }

  markChosen() {
    for (const button of grid.querySelectorAll(".thumb")) {
      const { layer, head } = button.dataset;
      button.setAttribute("aria-pressed", Number(layer) === this.place.layer && Number(head) === this.place.head);
    }
  }
}

function fill(select, options) {
  select.replaceChildren(
    ...options.map(([value, enabled]) => {
      const option = element("option", "", value);
      option.disabled = !enabled;
      return option;
    }),
  );
}
