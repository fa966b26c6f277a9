// Equations as MathML elements, from trees that docs/generate_equations.py wrote: [tag, attributes, ...children].

import { createElement } from "./vendor/preact.js";
import { html, useEffect, useState } from "./html.js";

const files = {}; // view: a promise of {id: {latex, tree}}, fetched once

const load = (view) =>
  (files[view] ??= fetch(`/web/views/${view}/equations.json`).then(
    (response) => response.json(),
    () => ({}),
  ));

const build = (node) =>
  typeof node === "string" ? node : createElement(node[0], node[1], ...node.slice(2).map((child) => build(child)));

// The equation of a view; one that is absent takes no place unless `reserved`.
export function Equation({ view, id, className, label = "Equation", reserved = false }) {
  const [known, setKnown] = useState({});
  useEffect(() => void load(view).then(setKnown), [view]);
  if (!known[id] && !reserved) return null;
  return html`<div class=${className} role="group" aria-label=${label} tabindex="0">
    ${known[id] && build(known[id].tree)}
  </div>`;
}
