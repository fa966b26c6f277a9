// The table of runs. A checked run is compared in the curves, in the colour of its swatch.

import { html, useSignal } from "../../html.js";
import { series } from "../../draw/colours.js";
import { compact, duration } from "../../draw/numbers.js";
import { chosen, compare, compared, isActive, listed } from "./store.js";

export function RunList() {
  const list = useSignal(listed);
  const names = compared(list, useSignal(chosen)).map((run) => run.run);
  return html`<section class="panel runs-list" aria-labelledby="runs-title">
    <h2 id="runs-title">Runs</h2>
    <div class="runs-scroll" tabindex="0" role="region" aria-label="Table of runs">
      <table>
        <thead>
          <tr>
            <th scope="col">Run</th>
            <th scope="col">State</th>
            <th scope="col" class="runs-right">Step</th>
            <th scope="col" class="runs-right">Loss</th>
            <th scope="col" class="runs-right">Held out</th>
            <th scope="col">Model</th>
            <th scope="col" class="runs-right">Tokens/s</th>
            <th scope="col">Started</th>
          </tr>
        </thead>
        <tbody>
          ${list.runs.map((run) => html`<${Row} key=${run.run} run=${run} colour=${names.indexOf(run.run)} />`)}
        </tbody>
      </table>
    </div>
  </section>`;
}

function Row({ run, colour }) {
  const on = colour >= 0;
  return html`<tr>
    <th scope="row">
      <label class="check">
        <input type="checkbox" checked=${on} onChange=${(event) => compare(run.run, event.target.checked)} />
        <span class="runs-swatch" style=${on ? { background: series(colour) } : {}}></span>
        <span class="runs-name">${run.run}</span>
      </label>
      ${run.problems.map((problem) => html`<p class="runs-problem">${problem}</p>`)}
    </th>
    <td><${Stage} run=${run} /></td>
    <td class="runs-right">
      ${run.step.toLocaleString("en")}${run.steps ? ` / ${run.steps.toLocaleString("en")}` : ""}
    </td>
    <td class="runs-right">${loss(run.loss)}</td>
    <td class="runs-right">${loss(run.held_out_loss)}</td>
    <td>${run.model}${run.parameters ? `, ${compact(run.parameters)}` : ""}</td>
    <td class="runs-right">${run.tokens_per_second ? Math.round(run.tokens_per_second).toLocaleString("en") : "–"}</td>
    <td>${run.started ? `${duration(Date.now() / 1000 - run.started)} ago` : "–"}</td>
  </tr>`;
}

export function Stage({ run }) {
  return html`<span class=${`runs-stage ${isActive(run) ? "active" : run.stage}`}>${run.stage}</span>`;
}

const loss = (value) => (value === null ? "–" : value.toFixed(4));
