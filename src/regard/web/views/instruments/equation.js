// Equations as MathML elements, from trees that docs/generate_equations.py wrote: [tag, attributes, ...children].

import { createElement } from "../../vendor/preact.js";
import { html, useEffect, useState } from "../../html.js";

let equations = null; // id: {latex, tree}, fetched once

async function load() {
  equations ??= await (await fetch("/web/views/instruments/equations.json")).json();
  return equations;
}

export const build = (node) =>
  typeof node === "string" ? node : createElement(node[0], node[1], ...node.slice(2).map((child) => build(child)));

export function Equation({ id }) {
  const [known, setKnown] = useState(equations);
  useEffect(() => void (known ?? load().then(setKnown, () => setKnown({}))), []);
  const equation = known?.[id];
  return html`<div class="instrument-equation" role="group" aria-label="Equation" tabindex="0">
    ${equation && build(equation.tree)}
  </div>`;
}
