// The drawing: one box per part, from the input to the output. Blocks that repeat are drawn once, with their number.

import { classes, html, useRef } from "../../html.js";
import { bytes, compact } from "../../draw/numbers.js";
import { kindTitle } from "./format.js";

const FORMATS = { parameters: compact, flops: compact, cache: bytes };
const UNITS = { parameters: "parameters", flops: "FLOPs per token", cache: "of cache" };
const STACKS = { source: "Encoder", target: "Decoder", vision: "Vision encoder", decoder: "Decoder" };
const FEEDFORWARD = new Set(["feedforward", "gated", "swiglu", "experts", "channel_mixing"]);

export function allParts(tree) {
  const ofBlock = (block) => [...(block.norm ? [block.norm] : []), ...block.sublayers.flatMap(partsOf)];
  return tree.stacks
    .flatMap(({ before, runs, after, ahead }) => [
      ...before,
      ...runs.flatMap(({ blocks }) => blocks.flatMap(ofBlock)),
      ...after,
      ...ahead.flatMap(ofBlock),
    ])
    .concat(tree.others);
}

const partsOf = ({ norm, body, after, scale }) => [norm, body, after, scale].filter(Boolean);

// One tab stop: the arrow keys go from part to part.
export function Diagram({ tree, measure, chosen, onChoose }) {
  const root = useRef();
  const names = allParts(tree).map(({ name }) => name);
  const largest = Math.max(1, ...allParts(tree).map((part) => part[measure]));
  const draw = (part) =>
    html`<${PartBox} key=${part.name} part=${part} measure=${measure} largest=${largest} chosen=${chosen}
      onChoose=${onChoose} />`;
  const move = (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const name = names[Math.min(Math.max(names.indexOf(chosen) + step, 0), names.length - 1)];
    onChoose(name);
    root.current.querySelector(`[data-part="${CSS.escape(name)}"]`)?.focus();
  };
  return html`<section class="inside-diagram" aria-label="Parts of the model" ref=${root} onKeyDown=${move}>
    ${tree.stacks.map((stack) => html`<${StackOfBlocks} key=${stack.name} stack=${stack} draw=${draw} />`)}
    ${tree.others.map(draw)}
  </section>`;
}

function StackOfBlocks({ stack, draw }) {
  const { name, kind, width, layers, before, runs, after, ahead } = stack;
  return html`<div class="inside-stack">
    <h2>${STACKS[name] ?? kindTitle(kind)} <small class="muted number">${layers} layers, width ${width}</small></h2>
    ${before.map(draw)}
    ${runs.map((run) => html`<${Run} key=${run.first} run=${run} draw=${draw} />`)} ${after.map(draw)}
    ${ahead.map((block, i) => html`<${BlockBox} key=${i} block=${block} title=${`ahead ${i + 1}, for training`}
      draw=${draw} />`)}
  </div>`;
}

function Run({ run, draw }) {
  const { times, tied, first, layers, blocks } = run;
  const title = layers === 1 ? `layer ${first}` : `layers ${first} to ${first + layers - 1}`;
  return html`<div class=${classes("inside-run", times > 1 && "repeated")}>
    <p class="inside-times">
      <span>${title}${tied && ", one set of weights"}</span>${times > 1 && html`<b>× ${times}</b>`}</p>
    ${blocks.map((block) => {
      const place = blocks.length > 1 ? (block.times > 1 ? `× ${block.times}` : `layer ${block.layer}`) : "";
      return html`<${BlockBox} key=${block.name} block=${block} title=${place} draw=${draw} />`;
    })}
  </div>`;
}

function BlockBox({ block, title, draw }) {
  return html`<div class="inside-block">
    ${title && html`<p class="inside-block-title muted">${title}</p>`} ${block.norm && draw(block.norm)}
    ${block.sublayers.map(
      (sublayer, i) => html`<div key=${i} class="inside-sublayer">
        <div class="inside-branch">${partsOf(sublayer).map(draw)}</div>
        <span class="inside-plus" aria-hidden="true">+</span>
      </div>`,
    )}
  </div>`;
}

function PartBox({ part, measure, largest, chosen, onChoose }) {
  const value = part[measure];
  return html`<button
    class=${classes("inside-part", `inside-part-${category(part)}`)}
    data-part=${part.name}
    aria-pressed=${part.name === chosen ? "true" : "false"}
    tabindex=${part.name === chosen ? 0 : -1}
    onClick=${() => onChoose(part.name)}
  >
    <span class="inside-part-title">${kindTitle(part.kind)}</span>
    <span class="inside-part-facts">${summary(part)}</span>
    <span class="inside-part-value number" title=${UNITS[measure]}>${value ? FORMATS[measure](value) : "–"}</span>
    <span class="inside-bar" aria-hidden="true"><i style=${{ width: `${(100 * value) / largest}%` }}></i></span>
  </button>`;
}

function category({ kind, name }) {
  if (kind.endsWith("norm") || kind === "layer_scale") return "norm";
  if (!name.endsWith(".body")) return "end";
  return FEEDFORWARD.has(kind) ? "feedforward" : "mixer";
}

// The sizes that tell parts of a kind apart, and the parts inside.
function summary({ settings, inner, weights }) {
  const { heads, kv_heads: kvHeads, hidden, count, top_k: topK, taps } = settings;
  const sizes = [
    heads && `${heads} heads`,
    kvHeads && kvHeads !== heads && `${kvHeads} of keys`,
    hidden && `${hidden} hidden`,
    count && `${count} experts, ${topK} used`,
    taps && `${taps} taps`,
  ];
  const shapes = Object.values(weights);
  const plain = shapes.length === 1 && shapes[0].length === 2 && !heads ? [shapes[0].join(" × ")] : [];
  return [...sizes.filter(Boolean), ...plain, ...inner.map(({ kind }) => kindTitle(kind))].join(" · ");
}
