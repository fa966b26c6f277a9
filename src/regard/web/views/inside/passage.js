// The passage that the lens reads: that of the chat, or a text that is typed here.

import * as api from "../../api.js";
import { html, useEffect, useSignal, useState } from "../../html.js";
import { Check } from "../../controls.js";
import { passage } from "../../state.js";
import { hasSource } from "../attention/axes.js";

const WORLD = "Ben was in the cellar. Emma is in the park. Ben moved to the kitchen. Where is Ben? Ben is in the";
const GENERAL = "When Mary and John went to the store, John gave a drink to";
const SOURCE = ["translate English to German: The house is wonderful.", "Das Haus ist wunderbar."];
const SMALL = 2000; // the vocabulary of the demo model, which knows little else, is smaller

export const isSmall = (model) => model.vocabulary < SMALL;

export function PassageBar({ model }) {
  const shown = useSignal(passage);
  const [editing, setEditing] = useState(false);
  useEffect(() => {
    if (!shown) write(model, hasSource(model) ? SOURCE[0] : isSmall(model) ? WORLD : GENERAL, SOURCE[1], false).catch(() => setEditing(true));
  }, [shown]);
  if (editing) return html`<${PassageForm} model=${model} shown=${shown} onDone=${() => setEditing(false)} />`;
  if (!shown) return null;
  return html`<div class="inside-passage">
    <p tabindex="0" role="group" aria-label="Passage">${shown.tokens.join("")}</p>
    <button onClick=${() => setEditing(true)}>Edit</button>
  </div>`;
}

function PassageForm({ model, shown, onDone }) {
  const source = hasSource(model);
  const [text, setText] = useState(shown ? shown.tokens.slice(0, source ? shown.generated : undefined).join("") : "");
  const [output, setOutput] = useState(shown && source ? shown.tokens.slice(shown.generated).join("") : "");
  const [chat, setChat] = useState(false);
  const [refusal, setRefusal] = useState("");
  const submit = async (event) => {
    event.preventDefault();
    if (!text) return setRefusal("Type some text first.");
    await write(model, text, output, chat).then(onDone, (error) => setRefusal(error.message));
  };
  return html`<form class="inside-form panel" onSubmit=${submit}>
    <label for="inside-text">${source ? "Source" : "Text"}</label>
    <textarea id="inside-text" rows="3" value=${text} onInput=${(event) => setText(event.target.value)}></textarea>
    ${source &&
    html`<label for="inside-output">Output so far</label>
      <textarea id="inside-output" rows="2" value=${output} onInput=${(event) => setOutput(event.target.value)}></textarea>`}
    ${model.chat && html`<${Check} label="as a message in the chat template" value=${chat} onChange=${setChat} />`}
    ${refusal && html`<p class="problem" role="alert">${refusal}</p>`}
    <div class="inside-buttons">
      <button type="submit" class="primary">Read it</button>
      <button type="button" class="quiet" onClick=${onDone}>Cancel</button>
    </div>
  </form>`;
}

async function write(model, text, output, chat) {
  const body = chat ? { messages: [{ role: "user", content: text }] } : { text };
  const { ids, tokens } = await api.tokenize(model.name, body);
  const target = hasSource(model) && output ? await api.tokenize(model.name, { text: output }) : { ids: [], tokens: [] };
  passage.value = { ids: [...ids, ...target.ids], tokens: [...tokens, ...target.tokens], generated: ids.length };
}
