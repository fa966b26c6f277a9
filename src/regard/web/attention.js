// The attention panel: thumbnails of all heads, and the full map of the selected one.

import * as api from "./api.js";
import { HeatMap, paint } from "./heatmap.js";
import { element, visible } from "./tokens.js";

const get = (id) => document.getElementById(id);
const [layers, heads, readout, frame, legend, grid] = ["layer", "head", "readout", "map-frame", "legend", "grid"].map(get);

export class AttentionPanel {
  constructor(model) {
    this.model = model;
    this.selected = { layer: Math.max(0, model.heads.findIndex((count) => count > 0)), head: 0 };
    this.map = new HeatMap(get("map"), (row, column) => this.describe(row, column));
    this.running = new AbortController();
    fillOptions(layers, model.heads.map((count, layer) => [layer, count > 0]));
    this.updatePickers();
    layers.addEventListener("change", () => this.select(Number(layers.value), 0));
    heads.addEventListener("change", () => this.select(this.selected.layer, Number(heads.value)));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.show(this.passage));
    addEventListener("resize", () => this.view && this.map.show(this.view.tokens, this.view.weights));
  }

  updatePickers() {
    fillOptions(heads, Array.from({ length: this.model.heads[this.selected.layer] }, (_, head) => [head, true]));
    [layers.value, heads.value] = [this.selected.layer, this.selected.head];
  }

  clear() {
    this.running.abort();
    this.passage = this.view = null;
    this.setVisible(false);
    grid.replaceChildren();
    readout.textContent = "Generate some text to see its attention maps.";
  }

  setVisible(shown) {
    for (const part of [frame, legend, get("grid-title")]) part.hidden = !shown;
    get("empty").hidden = shown;
  }

  // Loads the maps of a passage. A later call aborts an earlier one.
  async show(passage) {
    if (!passage) return this.clear();
    this.passage = passage;
    await this.load(async (signal) => {
      const { layers: rows } = await api.attention(this.model.name, passage, {}, signal);
      this.drawGrid(rows);
      await this.showSelected(signal);
    });
  }

  async select(layer, head) {
    this.selected = { layer, head };
    this.updatePickers();
    this.markSelected();
    if (this.passage) await this.load((signal) => this.showSelected(signal));
  }

  async load(work) {
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

  async showSelected(signal) {
    this.view = await api.attention(this.model.name, this.passage, this.selected, signal);
    this.setVisible(true);
    this.map.show(this.view.tokens, this.view.weights);
    paint(get("scale"), [Array.from({ length: 160 }, (_, i) => i / 159)]);
    const mean = this.view.entropy.reduce((sum, h) => sum + h, 0) / this.view.entropy.length;
    get("entropy").textContent = `mean entropy ${(mean / Math.LN2).toFixed(2)} bits`;
    this.describe(-1, -1);
  }

  // Describes one cell of the map above it, or the whole map if row is -1.
  describe(row, column) {
    const { tokens, weights, layer, head } = this.view;
    if (row < 0) {
      readout.textContent = `Layer ${layer}, head ${head}: rows are queries, columns are keys.`;
      return;
    }
    const weight = element("b", "", `${(100 * weights[row][column]).toFixed(1)} %`);
    const [query, key] = [row, column].map((i) => element("code", "", visible(tokens[i])));
    readout.replaceChildren(query, ` at ${row} attends to `, key, ` at ${column} with `, weight);
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
    this.markSelected();
  }

  thumbnail(layer, head, weights, entropy) {
    const button = element("button", "thumbnail");
    button.type = "button";
    Object.assign(button.dataset, { layer, head });
    const label = `layer ${layer}, head ${head}, mean entropy ${(entropy / Math.LN2).toFixed(2)} bits`;
    button.setAttribute("aria-label", label);
    button.title = label;
    const canvas = document.createElement("canvas");
    paint(canvas, weights);
    button.append(canvas);
    button.addEventListener("click", () => this.select(layer, head));
    return button;
  }

  markSelected() {
    for (const button of grid.querySelectorAll(".thumbnail")) {
      const { layer, head } = button.dataset;
      button.setAttribute("aria-pressed", Number(layer) === this.selected.layer && Number(head) === this.selected.head);
    }
  }
}

function fillOptions(select, options) {
  select.replaceChildren(
    ...options.map(([value, enabled]) => {
      const option = element("option", "", value);
      option.disabled = !enabled;
      return option;
    }),
  );
}
