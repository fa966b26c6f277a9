// The equation of a kind of part as MathML, from the trees that docs/generate_equations.py wrote.

import { html, useEffect, useState } from "../../html.js";
import { build } from "../instruments/equation.js";

let equations = null; // kind: {latex, tree}, fetched once

export function Equation({ kind }) {
  const [known, setKnown] = useState(equations);
  useEffect(() => {
    if (known) return;
    const keep = (found) => setKnown((equations = found));
    fetch("/web/views/inside/equations.json").then((response) => response.json().then(keep), () => setKnown({}));
  }, []);
  if (!known?.[kind]) return null;
  return html`<div class="inside-equation" role="group" aria-label="Equation" tabindex="0">${build(known[kind].tree)}</div>`;
}
