// The controls above the map, the filters of heads, and what the selected layer and head are.

import { html, useSignal } from "../../html.js";
import { Check, Choice, Segments, Slider } from "../../controls.js";
import { model, select, selection } from "../../state.js";
import { bits, percent } from "../../draw/numbers.js";
import { layerName } from "./axes.js";
import { useSelectedHead } from "./selected_head.js";
import { KINDS, kindFilter, set, settings, tokenFilter } from "./settings.js";
import { headMap, labelFailure, labels, labelsOf, overview } from "./weights.js";

const SCALES = [
  ["map", "largest weight"],
  ["row", "largest of each row"],
  ["absolute", "100 %"],
];

export function MapOptions() {
  const shown = useSignal(settings);
  const filter = useSignal(tokenFilter);
  return html`<div class="attention-options">
    <${Check}
      label="Hide the first token"
      title="Many heads give most of their weight to the first token if no other key matches."
      value=${shown.hideFirst}
      onChange=${(hideFirst) => set({ hideFirst })}
    />
    <${Choice} label="Full colour at" value=${shown.scale} choices=${SCALES} onChange=${(scale) => set({ scale })} />
    <${Choice}
      label="Colour scale"
      value=${shown.linear ? "linear" : "root"}
      choices=${[
        ["root", "square root"],
        ["linear", "linear"],
      ]}
      onChange=${(choice) => set({ linear: choice === "linear" })}
    />
    <${Slider}
      label="Hide below"
      min=${0}
      max=${0.5}
      step=${0.005}
      value=${shown.threshold}
      format=${percent}
      onChange=${(threshold) => set({ threshold })}
    />
    <div class="field">
      <label for="token-filter">Only tokens with</label>
      <input
        type="search"
        id="token-filter"
        value=${filter}
        placeholder="any text"
        onInput=${(event) => (tokenFilter.value = event.target.value)}
      />
    </div>
  </div>`;
}

export function ViewChoice() {
  const { view } = useSignal(settings);
  return html`<${Segments}
    label="Show the head as"
    value=${view}
    choices=${[
      ["map", "Map"],
      ["arcs", "Arcs"],
    ]}
    onChange=${(chosen) => set({ view: chosen })}
  />`;
}

// Layer and head by name, for the compact panel.
export function HeadPickers() {
  const opened = useSignal(model);
  const { layer, head } = useSignal(selection);
  const layers = opened.attention_layers
    .map((described, i) => [i, layerName(described)])
    .filter(([i]) => opened.heads[i] > 0);
  const heads = Array.from({ length: opened.heads[layer] ?? 0 }, (_, i) => [i, `Head ${i}`]);
  return html`<div class="attention-pickers">
    <${Choice} label="Layer" value=${layer} choices=${layers}
      onChange=${(chosen) => select({ layer: chosen, head: 0 })} />
    <${Choice} label="Head" value=${head} choices=${heads} onChange=${(chosen) => select({ head: chosen })} />
  </div>`;
}

// Buttons that show only the heads with a label, and the order of heads.
export function HeadFilters() {
  const found = useSignal(labels);
  const refusal = useSignal(labelFailure);
  const chosen = useSignal(kindFilter);
  const { order } = useSignal(settings);
  const choose = (kind) => {
    kindFilter.value = kind;
    const { layer, head } = selection.value;
    if (kind && !labelsOf(found, layer, head).some(([name]) => name === kind)) select(strongest(found.scores[kind]));
  };
  const counts = found
    ? Object.entries(found.scores).map(([kind, layers]) => [kind, count(layers, found.threshold)])
    : [];
  return html`<div class="attention-filters">
    <${Segments}
      label="Order of heads"
      value=${order}
      choices=${[
        ["layers", "By layer"],
        ["entropy", "By entropy"],
      ]}
      onChange=${(value) => set({ order: value })}
    />
    ${counts.map(
      ([kind, number]) => html`<button
        key=${kind}
        class="attention-kind"
        aria-pressed=${chosen === kind}
        title=${`Heads that attend to ${KINDS[kind]?.key ?? kind}: a mean over ${found.threshold} on random tokens`}
        disabled=${number === 0 && chosen !== kind}
        onClick=${() => choose(chosen === kind ? null : kind)}
      >
        <span class="attention-letter" data-kind=${kind} aria-hidden="true">${KINDS[kind]?.letter ?? "?"}</span>
        ${kind} <span class="muted">${number}</span>
      </button>`,
    )}
    ${
      counts.length > 0 &&
      counts.every(([, number]) => number === 0) &&
      html`<p class="muted attention-hint">
      On random tokens, no head gives more than ${Math.round(100 * found.threshold)} % of its weight to one of
      these keys.
      Larger models have such heads, for instance smollm2: load it in${" "}<a href="#/models">Models</a>.
    </p>`
    }
    ${refusal && html`<p class="muted" role="status">The heads have no labels: ${refusal}</p>`}
  </div>`;
}

// The head with the largest score; layers without a map have no scores.
function strongest(layers) {
  const heads = layers.flatMap((scores, layer) => (scores ?? []).map((score, head) => ({ layer, head, score })));
  const { layer, head } = heads.reduce((best, other) => (other.score > best.score ? other : best));
  return { layer, head };
}

const count = (layers, threshold) =>
  layers.reduce((sum, scores) => sum + (scores ?? []).filter((s) => s > threshold).length, 0);

// What the selected layer is, and the numbers of the selected head.
export function HeadFacts() {
  const opened = useSignal(model);
  const map = useSignal(headMap);
  const found = useSignal(overview);
  const labelled = useSignal(labels);
  const { layer, head } = useSelectedHead();
  const facts = [];
  const entropy =
    found?.layers[layer]?.entropy[head] ?? (map?.layer === layer && map.head === head ? mean(map.entropy) : null);
  if (entropy !== null && entropy !== undefined) facts.push(["Mean entropy", `${bits(entropy).toFixed(2)} bits`]);
  for (const [kind, score] of labelsOf(labelled, layer, head))
    facts.push([`${kind[0].toUpperCase()}${kind.slice(1)} score`, score.toFixed(2)]);
  facts.push(...mixerFacts(opened.attention_layers[layer], head));
  return html`<dl class="attention-facts">
    ${facts.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}
  </dl>`;
}

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

function* mixerFacts(layer, head) {
  let first = 0;
  for (const mixer of layer.mixers.filter(({ heads }) => heads > 0)) {
    const own = head - first;
    first += mixer.heads;
    if (own < 0 || own >= mixer.heads) continue;
    yield ["Mixer", layer.stack === "cross" ? "attention to the source" : mixer.name];
    if (mixer.implied)
      yield ["Map", "the matrix that the recurrence implies; entries may be negative and rows need not sum to 1"];
    if (mixer.window)
      yield [
        "Window",
        `the latest ${mixer.window} tokens${mixer.first_tokens ? ` and the first ${mixer.first_tokens}` : ""}`,
      ];
    else if (mixer.causal !== null && layer.stack !== "cross")
      yield ["Mask", mixer.causal ? "causal: earlier tokens and itself" : "none: all tokens"];
    if (mixer.sinks) yield ["Sink", "a learned score takes weight, so rows sum to less than 1"];
    if (mixer.kv_heads && mixer.kv_heads < mixer.heads) {
      const size = mixer.heads / mixer.kv_heads;
      const group = Math.floor(own / size);
      yield [
        "Keys and values",
        `shared by heads ${group * size} to ${(group + 1) * size - 1} (${mixer.kv_heads} groups)`,
      ];
    }
  }
  for (const { name, reason } of layer.mixers.filter(({ heads }) => heads === 0)) {
    yield ["Also in this layer", `${name}, which has no map${reason ? `: ${reason.replaceAll("`", "")}` : ""}`];
  }
}
