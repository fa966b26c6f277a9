// The model drawn from its spec: the stack from the tokens to the output, with the chosen part beside it.

import * as api from "../../api.js";
import { html, useState } from "../../html.js";
import { Segments, Slider } from "../../controls.js";
import { bytes, compact } from "../../draw/numbers.js";
import { useDelayed } from "../../request_hook.js";
import { exact } from "./format.js";
import { Diagram, allParts } from "./diagram.js";
import { PartPanel } from "./part.js";

const MEASURES = { parameters: "Parameters", flops: "FLOPs", cache: "Cache" };
const DELAY = 150; // milliseconds after the last move of the slider

export function ModelTab({ model }) {
  const longest = Math.floor(Math.log2(Math.max(model.context ?? 0, 1024)));
  const [power, setPower] = useState(Math.min(10, Math.floor(Math.log2(model.context ?? 1024))));
  const [tree, setTree] = useState(null);
  const [refusal, setRefusal] = useState("");
  const [measure, setMeasure] = useState("parameters");
  const [chosen, setChosen] = useState(null);
  const load = (signal) =>
    api.describeParts(model.name, 2 ** power, signal).then(
      (found) => (setTree(found), setRefusal("")),
      (error) => error.name === "AbortError" || setRefusal(error.message),
    );
  useDelayed(tree ? DELAY : 0, load, [power]);
  if (!tree) return html`<p class="notice" role="status">${refusal || "Drawing the model …"}</p>`;
  const parts = allParts(tree);
  const part = parts.find(({ name }) => name === chosen) ?? largestCache(parts);
  return html`
    <div class="inside-controls">
      <${Slider}
        label="Length of the sequence"
        value=${power}
        min=${4}
        max=${Math.max(longest, 17)}
        format=${(value) => `${exact(2 ** value)} tokens`}
        onChange=${setPower}
      />
      <div class="inside-measure">
        <span class="label">Bars show</span>
        <${Segments} label="Bars show" value=${measure} choices=${Object.entries(MEASURES)} onChange=${setMeasure} />
      </div>
    </div>
    ${refusal && html`<p class="problem" role="alert">${refusal}</p>`}
    <${Totals} tree=${tree} />
    <div class="inside-columns">
      <${Diagram} tree=${tree} measure=${measure} chosen=${part.name} onChoose=${setChosen} />
      <${PartPanel} part=${part} tree=${tree} />
    </div>
  `;
}

const largestCache = (parts) => parts.reduce((best, part) => (part.cache > best.cache ? part : best));

function Totals({ tree: { totals, length, dtype } }) {
  const facts = [
    ["parameters", compact(totals.parameters), exact(totals.parameters)],
    totals.active !== totals.parameters && ["active per token", compact(totals.active), exact(totals.active)],
    [`weights in ${dtype}`, bytes(totals.weights), `${exact(totals.weights)} bytes`],
    ["FLOPs per token", compact(totals.flops), `${exact(totals.flops)}, over ${exact(length)} tokens`],
    [`cache of ${exact(length)} tokens`, bytes(totals.cache), `${exact(totals.cache)} bytes`],
    totals.state && ["recurrent state", bytes(totals.state), `${exact(totals.state)} bytes`],
  ].filter(Boolean);
  return html`<dl class="inside-totals">
    ${facts.map(([name, value, title]) => html`<div key=${name} title=${title}><dt>${name}</dt><dd>${value}</dd>
      </div>`)}
  </dl>`;
}
