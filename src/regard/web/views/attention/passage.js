// The passage that the view shows: that of the last chat, or a text that is typed here.

import * as api from "../../api.js";
import { html, useEffect, useSignal, useState } from "../../html.js";
import { model, passage } from "../../state.js";
import { hasSource } from "./axes.js";
import { Words } from "./words.js";

const EXAMPLE = "Julia is in the garden. The key is in the kitchen. Ben took the key to the cellar. Where is the key?";
const EXAMPLE_OUTPUT = "The key is in the cellar.";

export function Passage() {
  const shown = useSignal(passage);
  const [editing, setEditing] = useState(false);
  if (!shown || editing) return html`<${PassageForm} shown=${shown} onDone=${() => setEditing(false)} />`;
  return html`<section class="attention-passage" aria-label="Passage">
    <${Words} />
    <p class="attention-passage-facts">
      <span class="muted number">${shown.ids.length.toLocaleString("en")} tokens</span>
      <button onClick=${() => setEditing(true)}>Edit</button>
    </p>
  </section>`;
}

function PassageForm({ shown, onDone }) {
  const opened = useSignal(model);
  const source = hasSource(opened);
  const [text, setText] = useState(() => (shown ? textOf(shown, source ? [0, shown.generated] : [0]) : EXAMPLE));
  const [output, setOutput] = useState(() => (shown && source ? textOf(shown, [shown.generated]) : EXAMPLE_OUTPUT));
  const [refusal, setRefusal] = useState("");
  const [running, setRunning] = useState(false);
  const tokenize = async (event) => {
    event?.preventDefault();
    setRunning(true);
    try {
      const { ids, tokens } = await api.tokenize(opened.name, { text });
      const target = source && output ? await api.tokenize(opened.name, { text: output }) : { ids: [], tokens: [] };
      if (ids.length + target.ids.length === 0) return setRefusal("Type some text first.");
      passage.value = { ids: [...ids, ...target.ids], tokens: [...tokens, ...target.tokens], generated: ids.length };
      setRefusal("");
      onDone();
    } catch (error) {
      if (!(error instanceof api.ApiError)) throw error;
      setRefusal(error.message);
    } finally {
      setRunning(false);
    }
  };
  useEffect(() => void (shown || tokenize()), [opened]); // a first passage, so that there is something to see
  const send = (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && tokenize(event);
  return html`<form class="attention-form" onSubmit=${tokenize}>
    <label for="passage-text">${source ? "Source" : "Text"}</label>
    <textarea id="passage-text" rows="3" value=${text} onInput=${(event) => setText(event.target.value)} onKeyDown=${send}></textarea>
    ${source &&
    html`<label for="passage-output">Output</label>
      <textarea id="passage-output" rows="2" value=${output} onInput=${(event) => setOutput(event.target.value)} onKeyDown=${send}></textarea>`}
    ${refusal && html`<p class="problem" role="alert">${refusal}</p>`}
    <div class="attention-form-buttons">
      <button type="submit" class="primary" disabled=${running}>Show attention</button>
      ${shown && html`<button type="button" class="quiet" onClick=${onDone}>Cancel</button>`}
    </div>
  </form>`;
}

const textOf = ({ tokens }, [first, end]) => tokens.slice(first, end).join("");
