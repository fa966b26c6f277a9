// Equations as MathML elements, from trees that docs/generate_equations.py wrote: [tag, attributes if any,
// ...children].

import { createElement } from "./vendor/preact.js";
import { html, useEffect, useState } from "./html.js";

const files = {}; // view: a promise of {id: [digest of the LaTeX, tree]}, fetched once

const load = (view) =>
  (files[view] ??= fetch(`/web/views/${view}/equations.json`).then(
    (response) => response.json(),
    () => ({}),
  ));

function build(node) {
  if (typeof node === "string") return node;
  const [tag, ...children] = node;
  const first = children[0];
  const attributes = typeof first === "object" && !Array.isArray(first) ? children.shift() : null;
  return createElement(tag, attributes, ...children.map((child) => build(child)));
}

// The equation of a view; one that is absent takes no place unless `reserved`.
export function Equation({ view, id, className, label = "Equation", reserved = false }) {
  const [known, setKnown] = useState({});
  useEffect(() => void load(view).then(setKnown), [view]);
  if (!known[id] && !reserved) return null;
  return html`<div class=${className} role="group" aria-label=${label} tabindex="0">
    ${known[id] && build(known[id][1])}
  </div>`;
}
