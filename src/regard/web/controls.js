// Labelled controls: slider, number, choice, check box. `onChange` gets the new value.

import { html, useId } from "./html.js";

const Help = ({ id, text }) => text && html`<p class="help" id=${`${id}-help`}>${text}</p>`;

export function Slider({ label, value, min, max, step = 1, format = String, help, onChange }) {
  const id = useId();
  return html`<div class="field">
    <label for=${id}>${label}<output for=${id}>${format(value)}</output></label>
    <input
      type="range"
      id=${id}
      min=${min}
      max=${max}
      step=${step}
      value=${value}
      aria-valuetext=${format(value)}
      aria-describedby=${help && `${id}-help`}
      onInput=${(event) => onChange(event.target.valueAsNumber)}
    />
    <${Help} id=${id} text=${help} />
  </div>`;
}

// An empty field is null.
export function NumberField({ label, value, min, max, step = 1, placeholder, help, onChange }) {
  const id = useId();
  const read = ({ target }) => onChange(Number.isNaN(target.valueAsNumber) ? null : target.valueAsNumber);
  return html`<div class="field">
    <label for=${id}>${label}</label>
    <input
      type="number"
      id=${id}
      min=${min}
      max=${max}
      step=${step}
      placeholder=${placeholder}
      value=${value ?? ""}
      aria-describedby=${help && `${id}-help`}
      onInput=${read}
    />
    <${Help} id=${id} text=${help} />
  </div>`;
}

// choices: [[value, title], …] or [value, …]
export function Choice({ label, value, choices, help, onChange }) {
  const id = useId();
  const pairs = choices.map((choice) => (Array.isArray(choice) ? choice : [choice, String(choice)]));
  const read = (event) => onChange(pairs[event.target.selectedIndex][0]);
  return html`<div class="field">
    <label for=${id}>${label}</label>
    <select id=${id} value=${value} aria-describedby=${help && `${id}-help`} onChange=${read}>
      ${pairs.map(([option, title]) => html`<option key=${option} value=${option}>${title}</option>`)}
    </select>
    <${Help} id=${id} text=${help} />
  </div>`;
}

// A choice of few, all visible. choices: [[value, title, disabled], …]
export function Segments({ label, value, choices, onChange }) {
  const name = useId();
  return html`<fieldset class="segments" aria-label=${label}>
    ${choices.map(
      ([choice, title, disabled]) => html`<label key=${choice}>
        <input
          type="radio"
          name=${name}
          value=${choice}
          checked=${choice === value}
          disabled=${disabled}
          onChange=${() => onChange(choice)}
        /><span>${title}</span>
      </label>`,
    )}
  </fieldset>`;
}

export function Check({ label, value, title, onChange }) {
  return html`<label class="check" title=${title}>
    <input type="checkbox" checked=${value} onChange=${(event) => onChange(event.target.checked)} />${label}
  </label>`;
}
