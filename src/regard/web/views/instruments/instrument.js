// One instrument: explanation, equation, controls, panels and its question. The server computes the panels.

import * as api from "../../api.js";
import { Check, Choice, Slider } from "../../controls.js";
import { html, useId, useRef, useSignal, useState } from "../../html.js";
import { model } from "../../state.js";
import { Equation } from "../../equation.js";
import { useDelayed } from "../../request_hook.js";
import { Panel } from "./panels.js";

const DELAY = 40; // milliseconds between the last change and the request
const RETRY = 500; // milliseconds until a busy server is asked again

export function Instrument({ instrument, number, count, previous, next, onDone }) {
  const defaults = Object.fromEntries(instrument.controls.map((control) => [control.name, control.default]));
  const [controls, setControls] = useState(defaults);
  const { panels, failure, waiting } = usePanels(instrument, controls);
  const set = (name, value) => setControls((values) => ({ ...values, [name]: value }));
  // A panel sets an index from 0: of an option, or of a slider, which is one larger if it counts from 1.
  // A place in the plane sets two sliders.
  const pick = (name, index) => {
    if (Array.isArray(name)) return name.forEach((axis, i) => set(axis, nearest(axis, index[i])));
    if (!name) return;
    const control = instrument.controls.find((control) => control.name === name);
    if (control.options) return set(name, control.options[index]);
    set(name, Math.min(index + (control.low === 0 ? 0 : 1), control.high));
  };
  const nearest = (name, value) => {
    const { low, high, step } = instrument.controls.find((control) => control.name === name);
    return Math.min(high, Math.max(low, Number((Math.round(value / step) * step).toFixed(6))));
  };
  return html`<article class="instrument" aria-labelledby="instrument-title">
    <header class="instrument-head">
      <p class="label">Instrument ${number} of ${count}</p>
      <h2 id="instrument-title">${instrument.title}</h2>
      <p class="instrument-explanation">${instrument.explanation}</p>
      <${Equation} view="instruments" id=${instrument.id} className="instrument-formula" reserved />
    </header>
    <section class="instrument-controls panel" aria-label="Controls">
      ${instrument.controls.map(
        (control) =>
          html`<${Control}
            key=${control.name}
            control=${control}
            value=${controls[control.name]}
            onChange=${(value) => set(control.name, value)}
          />`,
      )}
      <button class="quiet" onClick=${() => setControls(defaults)}>Reset</button>
    </section>
    ${failure && html`<p class="problem instrument-problem" role="alert">${failure}</p>`}
    <div class="instrument-panels" aria-busy=${waiting}>
      ${panels.map(
        (panel, i) =>
          html`<${Panel} key=${`${i} ${panel.kind}`} instrument=${instrument.id} panel=${panel} onPick=${pick} />`,
      )}
    </div>
    <${Question}
      quiz=${instrument.quiz}
      onAnswer=${() => (setControls({ ...defaults, ...instrument.quiz.setting }), onDone())}
    />
    <footer class="instrument-foot">
      <p class="muted">
        Computed by ${instrument.files.map((file, i) => html`${i > 0 && ", "}<code key=${file}>${file}</code>`)}
      </p>
      <p class="instrument-steps">
        ${previous && html`<a class="button" href=${`#/instruments/${previous.id}`}>← ${previous.title}</a>`}
        ${next && html`<a class="button" href=${`#/instruments/${next.id}`}>${next.title} →</a>`}
      </p>
    </footer>
  </article>`;
}

// The panels for the controls. The old ones stay until the new ones arrive, so nothing flickers.
function usePanels(instrument, controls) {
  const [state, setState] = useState({ panels: [], failure: "", waiting: true });
  const opened = useSignal(model);
  const load = async (signal) => {
    try {
      const { panels } = await api.instrument(instrument.id, controls, opened?.name, signal);
      setState({ panels, failure: "", waiting: false });
    } catch (error) {
      if (error.status === 429) setTimeout(() => signal.aborted || load(signal), RETRY);
      else if (error.name !== "AbortError")
        setState(({ panels }) => ({ panels, failure: error.message, waiting: false }));
    }
  };
  useDelayed(DELAY, load, [instrument, controls, opened?.name]);
  return state;
}

const digits = (step) => (step >= 1 ? 0 : Math.max(1, -Math.floor(Math.log10(step) + 1e-9)));

function Control({ control, value, onChange }) {
  const { kind, label } = control;
  if (kind === "slider") {
    const format = (number) =>
      control.names[number - control.low] ??
      number.toLocaleString("en", { minimumFractionDigits: 0, maximumFractionDigits: digits(control.step) });
    return html`<${Slider}
      label=${label}
      value=${value}
      min=${control.low}
      max=${control.high}
      step=${control.step}
      format=${format}
      onChange=${onChange}
    />`;
  }
  if (kind === "selection")
    return html`<${Choice} label=${label} value=${value} choices=${control.options} onChange=${onChange} />`;
  if (kind === "switch") return html`<${Check} label=${label} value=${value} onChange=${onChange} />`;
  return html`<${TextControl} label=${label} value=${value} onChange=${onChange} />`;
}

function TextControl({ label, value, onChange }) {
  const id = useId();
  return html`<div class="field">
    <label for=${id}>${label}</label>
    <input type="text" id=${id} maxlength="200" value=${value} onInput=${(event) => onChange(event.target.value)} />
  </div>`;
}

function Question({ quiz, onAnswer }) {
  const [open, setOpen] = useState(false);
  const answer = useRef();
  const show = () => {
    setOpen(true);
    onAnswer();
    setTimeout(() => answer.current?.focus(), 0);
  };
  return html`<section class="instrument-quiz panel" aria-label="Question">
    <p class="label">Question</p>
    <p class="instrument-question">${quiz.question}</p>
    ${
      open
        ? html`<p class="instrument-answer" tabindex="-1" ref=${answer}>${quiz.answer}</p>`
        : html`<button class="primary" onClick=${show}>Show the answer</button>`
    }
  </section>`;
}
