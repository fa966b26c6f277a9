// The demo: what it is, a button that trains it in a process of its own, its progress, and the trained model.

import * as api from "../../api.js";
import { html, useSignal, useState } from "../../html.js";
import { NumberField } from "../../controls.js";
import { duration } from "../../draw/numbers.js";
import { chosen, isActive, listed, refresh } from "./store.js";
import { OpenModel } from "./open.js";

const FEW = 20; // steps before the remaining time can be estimated

export function Demo() {
  const list = useSignal(listed);
  useSignal(chosen);
  const [error, setError] = useState("");
  const act = async (call) => {
    setError("");
    try {
      await call();
    } catch (failed) {
      setError(failed.message);
    }
    await refresh();
  };
  const demos = list.runs.filter((run) => run.is_demo);
  const running = demos.find(isActive);
  const newest = (stage) => demos.filter((run) => run.stage === stage).sort((a, b) => b.changed - a.changed)[0];
  const [stopped, finished] = [newest("stopped"), newest("finished")];
  const starting = list.process && list.process.stage !== "failed" ? list.process : null;
  const start = (name, steps) => act(() => api.startDemo(name, steps).then(() => (chosen.value = [name])));
  return html`<section class="panel runs-demo" aria-labelledby="runs-demo">
    <h2 id="runs-demo">Watch a model learn</h2>
    ${running || starting
      ? html`<${Progress}
        run=${running}
        process=${starting}
        onStop=${(name) => act(() => api.stopDemo(name))}
        mayStop=${list.may_start}
      />`
      : html`<${Offer} list=${list} stopped=${stopped} finished=${finished} onStart=${start} />`}
    ${list.process?.stage === "failed" && !running && html`<${Failed} process=${list.process} />`}
    ${error && html`<p class="problem" role="alert">${error}</p>`}
  </section>`;
}

function Offer({ list, stopped, finished, onStart }) {
  const [steps, setSteps] = useState(null);
  const name = freeName(list);
  const explanation = html`<p>
    A model of 0.6 million parameters reads made-up stories about people, places and things, and learns to answer
    questions about them. It takes about three minutes on two CPU cores. Nothing is downloaded.
  </p>`;
  if (!list.may_start) return html`${explanation}<p class="muted">Start it in a terminal: <code>regard demo</code></p>`;
  return html`
    ${finished
      ? html`<p>
            <b>${finished.run}</b> is trained${finished.exact_match !== null &&
            html`, and answers <b>${(100 * finished.exact_match).toFixed(1)} %</b> of the questions about stories that
              it has never seen`}.
          </p>
          <${OpenModel} name=${finished.run} />`
      : explanation}
    ${stopped &&
    html`<p><b>${stopped.run}</b> was stopped after ${exact(stopped.step)} of ${exact(stopped.steps ?? 0)} steps.</p>
      <button
        type="button"
        class=${finished ? "" : "primary"}
        onClick=${() => onStart(stopped.run, null)}
      >Continue ${stopped.run}</button>`}
    <div class="runs-start">
      <button type="button" class=${finished || stopped ? "" : "primary"} onClick=${() => onStart(name, steps)}>
        ${finished || stopped ? `Train another: ${name}` : "Start the demo"}
      </button>
      <${NumberField} label="Steps" value=${steps} min=${1} max=${100000} placeholder="1600" onChange=${setSteps} />
    </div>
    <p class="runs-hint">It trains in a process of its own: closing this page or the server does not stop it.</p>
  `;
}

function Progress({ run, process, onStop, mayStop }) {
  const name = run?.run ?? process.run;
  const stage = run?.stage ?? process.stage;
  const [step, steps] = [run?.step ?? 0, run?.steps ?? null];
  const speed = step >= FEW ? run.tokens_per_second / (run.tokens / step) : 0; // steps per second
  const left = speed ? (steps - step) / speed : null;
  const message = {
    starting: "Starting: Python and PyTorch are loaded …",
    stopping: "Stopping: the state is saved, so that training can continue …",
    answering: "Trained. It answers questions about stories that it has never seen …",
  }[stage];
  return html`
    <p role="status">${message ?? html`<b>${name}</b> is learning.`}</p>
    <progress
      class="runs-progress"
      max=${steps ?? 1}
      value=${stage === "starting" || !steps ? null : step}
      aria-label="Training steps"
    ></progress>
    <p class="muted number">
      ${steps ? `step ${exact(step)} of ${exact(steps)}` : ""}
      ${left && !message ? ` · about ${duration(left)} left` : ""}
      ${run?.loss ? ` · loss ${run.loss.toFixed(3)}` : ""}
      ${run?.tokens_per_second ? ` · ${Math.round(run.tokens_per_second).toLocaleString("en")} tokens/s` : ""}
    </p>
    ${mayStop && (run ? run.can_stop : true)
      ? html`<button type="button" disabled=${stage === "stopping"} onClick=${() => onStop(name)}>Stop</button>
          <p class="runs-hint">Stop saves the model after the current step; it can be continued later.</p>`
      : html`<p class="runs-hint">It was started elsewhere; stop it there with Ctrl-C.</p>`}
  `;
}

function Failed({ process }) {
  return html`<div class="runs-failed" role="alert">
    <p>The last start (${process.run}) failed:</p>
    <pre>${process.output.join("\n") || "It printed nothing."}</pre>
  </div>`;
}

const exact = (count) => count.toLocaleString("en");

function freeName({ runs }) {
  const taken = new Set(runs.map((run) => run.run));
  if (!taken.has("demo")) return "demo";
  let number = 2;
  while (taken.has(`demo-${number}`)) number++;
  return `demo-${number}`;
}
