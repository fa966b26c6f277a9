// One part: its equation, costs, settings, the shapes of its activations and weights, and its source.

import { html } from "../../html.js";
import { Equation } from "../../equation.js";
import { bytes } from "../../draw/numbers.js";
import { exact, kindTitle } from "./format.js";

export function PartPanel({ part, tree }) {
  const source = tree.sources[part.class];
  const shapes = Object.entries(tree.shapes)
    .filter(([name]) => name === part.name || name.startsWith(`${part.name}.`))
    .map(([name, shape]) => [name.slice(part.name.length + 1) || "output", shape]);
  return html`<section class="inside-panel panel" aria-labelledby="inside-part-title">
    <h2 id="inside-part-title">${kindTitle(part.kind)}</h2>
    <p class="muted"><code>${part.name}</code></p>
    <${Equation} view="inside" id=${part.kind} className="inside-equation" />
    <dl class="inside-costs">
      <${Cost} name="parameters" value=${exact(part.parameters)} />
      <${Cost} name=${`FLOPs per token at ${exact(tree.length)}`} value=${exact(part.flops)} />
      <${Cost} name=${`cache at ${exact(tree.length)}`} value=${bytes(part.cache)} />
    </dl>
    <${Settings} settings=${part.settings} />
    ${part.inner.map((inner) => html`<${Inner} key=${inner.field + inner.kind} inner=${inner} />`)}
    <${Shapes} title="Activations" rows=${shapes} note="B: batch, L: length" />
    <${Shapes} title="Weights" rows=${Object.entries(part.weights)} />
    ${source && html`<${Source} source=${source} />`}
  </section>`;
}

const Cost = ({ name, value }) => html`<div><dt>${name}</dt><dd class="number">${value}</dd></div>`;

function Settings({ settings }) {
  const entries = Object.entries(settings);
  if (entries.length === 0) return null;
  return html`<ul class="inside-settings" aria-label="Settings">
    ${entries.map(([name, value]) => html`<li key=${name}><span>${kindTitle(name)}</span> ${String(value)}</li>`)}
  </ul>`;
}

function Inner({ inner }) {
  return html`<div class="inside-inner">
    <h3>${kindTitle(inner.field)}: ${kindTitle(inner.kind)}</h3>
    <${Equation} view="inside" id=${inner.kind} className="inside-equation" />
    <${Settings} settings=${inner.settings} />
    ${inner.inner.map((part) => html`<${Inner} key=${part.field + part.kind} inner=${part} />`)}
  </div>`;
}

function Shapes({ title, rows, note }) {
  if (rows.length === 0) return null;
  return html`<details open=${rows.length <= 8}>
    <summary>${title} ${note && html`<span class="muted">(${note})</span>`}</summary>
    <table class="inside-shapes">
      <tbody>
        ${rows.map(([name, shape]) => html`<tr key=${name}><th scope="row"><code>${name}</code></th>
          <td>${shape.join(" × ")}</td></tr>`)}
      </tbody>
    </table>
  </details>`;
}

function Source({ source }) {
  const place = source.line ? `${source.file}, line ${source.line}` : source.file;
  return html`<details open>
      <summary>Source <span class="muted">${place}</span></summary>
      ${
        source.source
          ? html`<pre class="inside-source" tabindex="0" role="region" aria-label=${`Source of ${source.class}`}>
            <code>${source.source}</code></pre>`
          : html`<p class="muted">The file of ${source.class} is not available.</p>`
      }
    </details>
    ${
      source.about &&
      html`<details>
      <summary>About <span class="muted">from its file</span></summary>
      <pre class="inside-about" tabindex="0" role="region" aria-label=${`About ${source.class}`}>${source.about}</pre>
    </details>`
    }`;
}
