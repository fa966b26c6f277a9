// The prompt and the buttons around it.

import { Check, Segments } from "../../controls.js";
import { html, useLayoutEffect, useRef, useSignal } from "../../html.js";
import { draft, running, stop } from "./generation.js";
import { Sampling } from "./sampling.js";
import { tint, view } from "./preferences.js";

export function Composer({ conversation, model, onSend, onNew, canContinue }) {
  const text = useSignal(draft);
  const busy = useSignal(running).size > 0;
  const shownAs = useSignal(view);
  const field = useRef();
  const chat = conversation.mode === "chat";
  useLayoutEffect(() => {
    field.current.style.height = "auto";
    field.current.style.height = `${Math.min(field.current.scrollHeight + 2, innerHeight / 3)}px`;
  }, [text]);
  const submit = (event) => {
    event?.preventDefault();
    if (!busy && (text.trim() || canContinue)) onSend(text);
  };
  const keys = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  };
  const placeholder = chat
    ? "Write a message …"
    : model.source
      ? "Write a source text …"
      : "Write a prompt; leave it empty to continue the last passage …";
  return html`<form class="chat-composer" id="composer" onSubmit=${submit}>
    <label class="visually-hidden" for="prompt">Prompt</label>
    <textarea
      id="prompt"
      ref=${field}
      rows="1"
      placeholder=${placeholder}
      autocomplete="off"
      spellcheck="false"
      value=${text}
      onInput=${(event) => (draft.value = event.target.value)}
      onKeyDown=${keys}
    ></textarea>
    <div class="chat-bar">
      ${
        conversation.columns.length === 1 &&
        html`<${Sampling} model=${model} column=${conversation.columns[0]} index=${0} chat=${chat} />`
      }
      <${Check}
        label="Surprisal"
        title="Tint tokens by their surprisal, −log₂ of their probability"
        value=${useSignal(tint)}
        onChange=${(value) => (tint.value = value)}
      />
      ${
        chat &&
        html`<${Segments}
          label="Show answers as"
          value=${shownAs}
          choices=${[
            ["tokens", "Tokens"],
            ["markdown", "Markdown"],
          ]}
          onChange=${(value) => (view.value = value)}
        />`
      }
      <span class="chat-buttons">
        <button type="button" class="quiet" id="clear" onClick=${onNew}>New</button>
        ${
          busy
            ? html`<button type="button" id="stop" key="stop" onClick=${stop}>Stop</button>`
            : html`<button type="submit" class="primary" id="send" key="send">
                ${chat ? "Send" : model.source ? "Generate" : "Continue"}
              </button>`
        }
      </span>
    </div>
  </form>`;
}
