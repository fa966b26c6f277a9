// The passage that a view shows: that of the chat, an example, or a text that is typed here.

import * as api from "./api.js";
import { html, useEffect, useSignal, useState } from "./html.js";
import { Check } from "./controls.js";
import { model, passage } from "./state.js";
import { hasSource } from "./views/attention/axes.js";

const WORLD = "Ben was in the cellar. Emma is in the park. Ben moved to the kitchen. Where is Ben? Ben is in the";
const GENERAL = "When Mary and John went to the store, John gave a drink to";
const SOURCE = "translate English to German: The house is wonderful.";
const OUTPUT = "Das Haus ist wunderbar.";
const SMALL_VOCABULARY = 5000; // a model with fewer tokens is one like the demo, which knows a few dozen words

export const isSmall = (opened) => opened.vocabulary < SMALL_VOCABULARY;

const exampleOf = (opened) =>
  hasSource(opened) ? { text: SOURCE, output: OUTPUT } : { text: isSmall(opened) ? WORLD : GENERAL, output: "" };

// draw(shown, edit): the passage as a view shows it; edit() opens the form, whose button is called `action`.
export function PassageBar({ action, draw }) {
  const opened = useSignal(model);
  const shown = useSignal(passage);
  const [editing, setEditing] = useState(false);
  const [refusal, setRefusal] = useState(""); // of the example
  useEffect(() => {
    if (shown || editing) return;
    setRefusal("");
    tokenize(opened, exampleOf(opened)).then(
      (found) => isOpen(opened) && (passage.value ??= { ...found, example: true }),
      (error) => isOpen(opened) && (setRefusal(error.message), setEditing(true)),
    );
  }, [shown, editing, opened]);
  const close = () => (setRefusal(""), setEditing(false));
  if (editing) return html`<${PassageForm} ...${{ opened, shown, action, refusal }} onDone=${close} />`;
  return shown ? draw(shown, () => setEditing(true)) : html`<p class="notice">Reading …</p>`;
}

function PassageForm({ opened, shown, action, refusal: first, onDone }) {
  const source = hasSource(opened);
  const [form, setForm] = useState(() => (shown ? textsOf(shown, source) : exampleOf(opened)));
  const [refusal, setRefusal] = useState(first);
  const [running, setRunning] = useState(false);
  const change = (name) => (value) => setForm((now) => ({ ...now, [name]: value }));
  const submit = async (event) => {
    event.preventDefault();
    if (!form.text && !(source && form.output)) return setRefusal("Type some text first.");
    setRunning(true);
    try {
      const found = await tokenize(opened, form);
      if (isOpen(opened)) passage.value = found;
      onDone();
    } catch (error) {
      setRefusal(error.message);
    }
    setRunning(false);
  };
  const send = (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && submit(event);
  const field = (name, rows) => html`<textarea
    id=${`passage-${name}`}
    rows=${rows}
    value=${form[name]}
    onInput=${(event) => change(name)(event.target.value)}
    onKeyDown=${send}
  ></textarea>`;
  return html`<form class="passage-form" onSubmit=${submit}>
    <label for="passage-text">${source ? "Source" : "Text"}</label>
    ${field("text", 3)} ${source && html`<label for="passage-output">Output</label>${field("output", 2)}`}
    ${opened.chat &&
    html`<${Check} label="as a message in the chat template" value=${form.chat ?? false} onChange=${change("chat")} />`}
    ${refusal && html`<p class="problem" role="alert">${refusal}</p>`}
    <div class="passage-form-buttons">
      <button type="submit" class="primary" disabled=${running}>${action}</button>
      ${shown && html`<button type="button" class="quiet" onClick=${onDone}>Cancel</button>`}
    </div>
  </form>`;
}

function textsOf({ tokens, generated }, source) {
  const end = source ? generated : tokens.length;
  return { text: tokens.slice(0, end).join(""), output: tokens.slice(end).join("") };
}

// Another model may have been opened while a text was tokenized.
const isOpen = ({ name }) => model.value?.name === name;

async function tokenize(opened, { text, output, chat }) {
  const body = chat ? { messages: [{ role: "user", content: text }] } : { text };
  const { ids, tokens } = await api.tokenize(opened.name, body);
  const none = { ids: [], tokens: [] };
  const target = hasSource(opened) && output ? await api.tokenize(opened.name, { text: output }) : none;
  if (ids.length + target.ids.length === 0) throw new api.ApiError("The text has no tokens: type more.", 400, "empty");
  return { ids: [...ids, ...target.ids], tokens: [...tokens, ...target.tokens], generated: ids.length };
}
