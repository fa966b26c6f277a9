// The sampling controls of a column, each with a line that says what it does, and the system prompt.

import { NumberField, Slider } from "../../controls.js";
import { html, useEffect, useId, useRef, useSignal } from "../../html.js";
import { touch } from "./conversations.js";
import { changed, SETTINGS, settingsOf, summary } from "./settings.js";

export function Sampling({ model, column, index, chat }) {
  useSignal(changed[index]);
  const details = useRef();
  const settings = settingsOf(model, index);
  const set = (name) => (value) => (changed[index].value = { ...changed[index].value, [name]: value });
  useEffect(() => {
    const close = (event) => {
      const outside = event.type === "pointerdown" && !details.current.contains(event.target);
      if (!details.current.open || !(outside || event.key === "Escape")) return;
      details.current.open = false;
      if (event.key === "Escape") details.current.firstElementChild.focus();
    };
    addEventListener("pointerdown", close);
    addEventListener("keydown", close);
    return () => (removeEventListener("pointerdown", close), removeEventListener("keydown", close));
  }, []);
  return html`<details class="chat-sampling" ref=${details}>
    <summary>Sampling <span class="number">${summary(settings)}</span></summary>
    <div class="chat-popover">
      ${chat && html`<${SystemPrompt} column=${column} />`}
      ${SETTINGS.map(
        ({ name, label, min, max, step, digits, help }) =>
          html`<${Slider}
            key=${name}
            ...${{ label, min, max, step, help }}
            value=${settings[name]}
            format=${(value) => value.toFixed(digits)}
            onChange=${set(name)}
          />`,
      )}
      <${NumberField}
        label="Maximum new tokens"
        min="1"
        max=${model.context}
        value=${settings.max_tokens}
        help="Generation ends here if the model has not ended its text before."
        onChange=${set("max_tokens")}
      />
      <${NumberField}
        label="Seed"
        min="0"
        placeholder="random"
        value=${settings.seed}
        help="The same seed draws the same tokens again."
        onChange=${set("seed")}
      />
      <button type="button" onClick=${() => (changed[index].value = {})}>Reset to defaults</button>
    </div>
  </details>`;
}

function SystemPrompt({ column }) {
  const id = useId();
  const set = (event) => {
    column.system = event.target.value;
    touch();
  };
  return html`<div class="field">
    <label for=${id}>System prompt</label>
    <textarea
      id=${id}
      rows="2"
      placeholder="none"
      value=${column.system}
      aria-describedby=${`${id}-help`}
      onInput=${set}
    ></textarea>
    <p class="help" id=${`${id}-help`}>
      Comes before the first message and says how to answer. Models that were not trained with one ignore it.
    </p>
  </div>`;
}
