// Activation patching: two prompts, and for every layer and position how much of the clean answer one cell restores.

import * as api from "../../api.js";
import { html, useState } from "../../html.js";
import { Check } from "../../controls.js";
import { isSmall } from "../../passage_form.js";
import { useDelayed } from "../../request_hook.js";
import { hasSource } from "../attention/axes.js";
import { visible } from "../../token_text.js";
import { Effects } from "./effects.js";
import { useEvents } from "./stream.js";

const WORLD = [
  "Ben is in the cellar. Where is Ben? Ben is in the",
  "Ben is in the kitchen. Where is Ben? Ben is in the",
];
const GENERAL = ["The capital of France is the city of", "The capital of Italy is the city of"];
const SOURCES = ["translate English to German: The house is big.", "translate English to German: My house is big."];

export function PatchingTab({ model }) {
  const example = hasSource(model) ? SOURCES : isSmall(model) ? WORLD : GENERAL;
  const [form, setForm] = useState({ clean: example[0], corrupted: example[1], answer: "", wrong: "", chat: false });
  const [sent, setSent] = useState(null);
  const change = (name) => (value) => setForm((now) => ({ ...now, [name]: value }));
  const { events, running, problem, stop } = useEvents(api.patchEvents, sent, sent && sent.key);
  const submit = (event) => {
    event.preventDefault();
    const { answer, wrong, ...prompts } = form;
    const tokens = answer || wrong ? { answer, wrong } : {};
    const body = { model: model.name, ...prompts, ...tokens };
    Object.defineProperty(body, "key", { value: `${performance.now()}` }); // not sent: it starts the same body again
    setSent(body);
  };
  return html`
    <p class="inside-lead">
      The model reads the corrupted prompt, with one vector of its residual stream from the clean one.
      A cell that restores the clean answer carries the difference between the prompts. They need the same
      number of tokens.
    </p>
    <form class="inside-patch panel" onSubmit=${submit}>
      <${Prompt} id="clean" label="Clean prompt" value=${form.clean} ...${{ model, chat: form.chat }}
        onInput=${change("clean")} />
      <${Prompt} id="corrupted" label="Corrupted prompt" value=${form.corrupted} ...${{ model, chat: form.chat }}
        onInput=${change("corrupted")} />
      <${Token} id="answer" label="Answer" value=${form.answer} placeholder="predicted after the clean prompt"
        onInput=${change("answer")} />
      <${Token} id="wrong" label="Wrong answer" value=${form.wrong} placeholder="predicted after the corrupted prompt"
        onInput=${change("wrong")} />
      <div class="inside-buttons">
        <button type="submit" class="primary">Patch every cell</button>
        ${running && html`<button type="button" onClick=${stop}>Stop</button>`}
        ${model.chat && html`<${Check} label="prompts are chat messages" value=${form.chat}
          onChange=${change("chat")} />`}
      </div>
    </form>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    ${running && events.length === 0 && html`<p class="notice">Reading both prompts …</p>`}
    ${events[0] && html`<${Effects} key=${sent?.key} body=${sent} events=${events} running=${running} />`}
  `;
}

// A prompt with its tokens below, so that one can see why two prompts differ in length.
function Prompt({ id, label, value, model, chat, onInput }) {
  const [tokens, setTokens] = useState([]);
  const load = (signal) => {
    const body = chat ? { messages: [{ role: "user", content: value }] } : { text: value };
    api.tokenize(model.name, body, signal).then(
      (found) => setTokens(found.tokens),
      (error) => error.name === "AbortError" || setTokens([]),
    );
  };
  useDelayed(200, load, [value, chat]);
  return html`<div class="inside-prompt">
    <label for=${`inside-${id}`}>${label}<span class="muted number">${tokens.length} tokens</span></label>
    <textarea id=${`inside-${id}`} rows="2" required value=${value} onInput=${(event) => onInput(event.target.value)}>
      </textarea>
    <p class="inside-tokens" aria-hidden="true">${tokens.map((token, i) => html`<span
      key=${i}>${visible(token)}</span>`)}</p>
  </div>`;
}

const Token = ({ id, label, value, placeholder, onInput }) => html`<div class="field">
  <label for=${`inside-${id}`}>${label} (one token, or empty)</label>
  <input type="text" id=${`inside-${id}`} value=${value} placeholder=${placeholder}
    onInput=${(event) => onInput(event.target.value)} />
</div>`;
