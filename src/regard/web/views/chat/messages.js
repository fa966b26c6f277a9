// The messages of one column: bubbles of the user and answers of the model in a chat, passages in "continue" mode.

import { html, useMemo, useState } from "../../html.js";
import { Markdown } from "../../markdown.js";
import { promptOf, running } from "./generation.js";
import { Branches, edit, Editor, End, Footer } from "./message_parts.js";
import { Passage } from "./passage.js";
import { promptPieces, Tokens } from "./tokens.js";
import { path, textOf, tokensOf } from "./tree.js";

// column, index: of the conversation; view: "tokens" or "markdown"
export function Messages({ mode, column, index, view, model }) {
  const nodes = path(column);
  const busy = running.value.has(index);
  const last = nodes.at(-1);
  const prompt = last?.role === "assistant" ? promptOf(last) : null;
  const shared = { column, index, view, busy, last, model };
  const spans = prompt?.spans.slice(1 - nodes.length) ?? []; // of all messages but the last, without the system prompt
  if (mode === "continue") {
    return passages(nodes).map((part) => html`<${Passage} key=${part[0].id} ...${{ ...shared, nodes: part }} />`);
  }
  return nodes.map((node, i) => {
    const Message = node.role === "user" ? UserMessage : Answer;
    const span = (node !== last && spans[i]) || null;
    return html`<${Message} key=${node.id} ...${{ ...shared, node, prompt, span }} />`;
  });
}

function passages(nodes) {
  const found = [];
  for (const node of nodes) {
    if (node.role === "user") found.push([node]);
    else found.at(-1)?.push(node);
  }
  return found;
}

function UserMessage({ node, column, span, prompt, last, busy }) {
  const [editing, setEditing] = useState(false);
  const pieces = useMemo(() => span && promptPieces(prompt, ...span), [prompt, span]);
  const done = (text) => (setEditing(false), text !== null && edit(text, node, column));
  const text = span
    ? html`<${Tokens}
        pieces=${pieces}
        offset=${span[0]}
        trim=${true}
        label="Tokens of your message"
        source=${{ node: last, prompt: true, first: span[0] }}
      />`
    : node.text;
  return html`<article class="chat-turn chat-user">
    <h2 class="visually-hidden">You</h2>
    ${editing ? html`<${Editor} text=${node.text} onDone=${done} />` : html`<div class="chat-content">${text}</div>`}
    <div class="chat-actions">
      <${Branches} column=${column} node=${node} busy=${busy} />
      ${
        !editing &&
        html`<button type="button" class="quiet" disabled=${busy} onClick=${() => setEditing(true)}>Edit</button>`
      }
    </div>
  </article>`;
}

function Answer({ node, column, index, span, prompt, last, view, busy, model }) {
  const streaming = busy && node === last && node.finish === null;
  const offset = node === last ? (prompt?.ids.length ?? null) : offsetOf(node, span);
  const branches = node.model === model?.name && !busy;
  const markdown = view === "markdown" && !streaming;
  const source = { node, index, branches };
  return html`<article
    class=${streaming ? "chat-turn chat-model chat-streaming" : "chat-turn chat-model"}
    aria-busy=${streaming}
  >
    <h2 class="visually-hidden">Model</h2>
    ${node === last && prompt && html`<${PromptTokens} node=${node} prompt=${prompt} />`}
    <div class="chat-content">
      ${
        markdown
          ? html`<${Markdown} text=${textOf(node)} />`
          : html`<${Tokens}
                pieces=${node.pieces}
                offset=${offset}
                trim=${true}
                label="Tokens of the answer"
                source=${source}
              /><${End} node=${node} source=${source} />`
      }
    </div>
    <${Footer} ...${{ node, column, index, busy, streaming }} />
  </article>`;
}

// An earlier answer has its place in the prompt, if it was encoded to the same number of tokens.
const offsetOf = (node, span) => (span && span[1] - span[0] === tokensOf(node).length ? span[0] : null);

// Everything that the model has read, with the tokens of the chat template.
function PromptTokens({ node, prompt }) {
  const [open, setOpen] = useState(false);
  const pieces = useMemo(() => open && promptPieces(prompt, 0, prompt.ids.length), [open, prompt]);
  return html`<details class="chat-prompt" onToggle=${(event) => setOpen(event.target.open)}>
    <summary>Prompt, as the model reads it · ${prompt.ids.length} tokens</summary>
    ${
      open &&
      html`<${Tokens}
        pieces=${pieces}
        offset=${0}
        label="Tokens of the prompt"
        source=${{ node, prompt: true, first: 0 }}
      />`
    }
  </details>`;
}
