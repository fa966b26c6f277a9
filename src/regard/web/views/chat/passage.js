// A passage of "continue" mode: the prompt and what the model has generated from it; for an encoder-decoder the source
// and its output.

import { html, useMemo, useState } from "../../html.js";
import { promptOf } from "./generation.js";
import { edit, Editor, End, Footer } from "./message_parts.js";
import { promptPieces, Tokens } from "./tokens.js";
import { tokensOf } from "./tree.js";

export function Passage({ nodes, column, index, last, busy, model }) {
  const [asked, ...answers] = nodes;
  const final = answers.at(-1);
  const prompt = final && final === last ? promptOf(final) : null;
  const streaming = busy && final === last && final?.finish === null;
  const [editing, setEditing] = useState(false);
  const source = model?.source;
  const given = html`<${Given} ...${{ text: asked.text, node: final, prompt, source }} />`;
  const done = (text) => (setEditing(false), text !== null && edit(text, asked, column));
  const generated = html`<${Generated} ...${{ answers, prompt, index, busy, model }} />`;
  const footer = { node: final, column, index, busy, streaming, asked, onEdit: () => setEditing(true) };
  return html`<article
    class=${streaming ? "chat-turn chat-passage chat-streaming" : "chat-turn chat-passage"}
    aria-busy=${streaming}
  >
    <h2 class="visually-hidden">Passage</h2>
    ${
      editing
        ? html`<${Editor} text=${asked.text} onDone=${done} />`
        : source
          ? html`<p class="label">Source</p>
              <div class="chat-content chat-source">${given}</div>
              <p class="label">Output</p>
              <div class="chat-content">${generated}</div>`
          : html`<div class="chat-content">${given}${generated}</div>`
    }
    ${final && html`<${Footer} ...${footer} />`}
  </article>`;
}

function Given({ text, node, prompt, source }) {
  const span = prompt?.spans[0];
  const pieces = useMemo(() => span && promptPieces(prompt, ...span), [prompt, span]);
  if (!span) return html`<span class="chat-given">${text}</span>`;
  const details = { node, prompt: true, first: span[0], unscored: source };
  return html`<span class="chat-given">
    <${Tokens} pieces=${pieces} offset=${span[0]} label="Tokens of the prompt" source=${details} />
  </span>`;
}

// Why the output of an encoder-decoder has no branches.
const SOURCE_ONLY = "The server takes only the source of an encoder-decoder, so the output cannot go on from a token.";

function Generated({ answers, prompt, index, busy, model }) {
  const source = model?.source;
  const before = answers.slice(0, -1).flatMap(tokensOf).length;
  // unknown if the prompt has answers of another model, whose text was encoded again
  let offset = prompt?.spans[0] ? prompt.ids.length - (source ? 0 : before) : null;
  return answers.map((node) => {
    const at = node === answers.at(-1) && prompt ? prompt.ids.length : offset;
    if (offset !== null) offset += tokensOf(node).length;
    const branches = node.model === model?.name && !busy && !source;
    const details = { node, index, branches, refusal: source && SOURCE_ONLY };
    return html`<${Tokens}
        key=${node.id}
        pieces=${node.pieces}
        offset=${at}
        trim=${source}
        label="Generated tokens"
        source=${details}
      /><${End} key=${`${node.id} end`} node=${node} source=${details} />`;
  });
}
