// What all messages have: the mark of the end, buttons, versions, the editor.

import { CopyButton } from "../../copying.js";
import { bits } from "../../draw/numbers.js";
import { html, useEffect, useRef, useState } from "../../html.js";
import { conversation, touch } from "./conversations.js";
import { answer, send } from "./generation.js";
import { children, chooseSibling, path, textOf, tokensOf } from "./tree.js";

// Replaces a message by a new version, in every column the message in the same place.
export function edit(text, node, column) {
  const depth = path(column).indexOf(node);
  const parents = conversation.value.columns.map((other) => {
    const shown = path(other);
    return shown[depth]?.parent ?? shown.at(-1)?.id ?? "";
  });
  return send(text, parents);
}

// The stop token: where the model ended its text.
export function End({ node, source }) {
  if (!node.end) return null;
  const pieces = [{ text: "", tokens: [node.end] }];
  const shifted = { ...source, shift: tokensOf(node).length, end: true };
  const keep = (element) => element && (element.tokenList = { pieces, source: shifted });
  return html`<span class="chat-tokens chat-end" ref=${keep}>
    <span class="chat-token" role="img" tabindex="0" data-start="0" aria-label="End of the text"></span>
  </span>`;
}

export function Footer({ node, column, index, busy, streaming, asked, onEdit }) {
  const again = () => answer(index, node.parent);
  return html`<div class="chat-actions">
    <${Branches} column=${column} node=${node} busy=${busy} />
    ${asked && html`<${Branches} column=${column} node=${asked} busy=${busy} label="Prompt" />`}
    ${
      !streaming &&
      html`<button type="button" class="quiet" disabled=${busy} onClick=${again}>Regenerate</button>
        ${onEdit && html`<button type="button" class="quiet" disabled=${busy} onClick=${onEdit}>Edit</button>`}
        <${CopyButton} text=${textOf(node).trim()} />
        <p class="chat-stats">${statistics(node)}</p>`
    }
  </div>`;
}

function statistics(node) {
  const { count, finish, seconds } = node;
  if (finish === "stop" && !node.pieces.length) return "the model ended without any text";
  if (!count) return finish === "stopped" ? "stopped" : "";
  const scored = [...tokensOf(node), ...(node.end ? [node.end] : [])];
  const mean = scored.reduce((sum, token) => sum + bits(-token.logprob), 0) / scored.length;
  const reason = { stop: "ended", length: "token limit reached", stopped: "stopped", failed: "failed" }[finish];
  const all = scored.length === 1 ? "1 token" : `${scored.length} tokens`;
  const tokens = count < scored.length ? `${all}, ${count} of them new` : all; // after a branch
  return `${tokens} · ${(count / seconds).toFixed(0)} per second · ${mean.toFixed(2)} bits per token · ${reason}`;
}

// "‹ 2/3 ›": the versions of a message.
export function Branches({ column, node, busy, label = "Version" }) {
  const siblings = children(column, node.parent).filter((sibling) => sibling.role === node.role);
  if (siblings.length < 2) return null;
  const at = siblings.indexOf(node) + 1;
  const turn = (step) => () => (chooseSibling(column, node, step), touch());
  return html`<span class="chat-branches" role="group" aria-label=${`${label} ${at} of ${siblings.length}`}>
    <button type="button" class="quiet" aria-label="Previous version" disabled=${busy || at === 1} onClick=${turn(-1)}>
      ‹
    </button>
    <span class="number">${at}/${siblings.length}</span>
    <button
      type="button"
      class="quiet"
      aria-label="Next version"
      disabled=${busy || at === siblings.length}
      onClick=${turn(1)}
    >
      ›
    </button>
  </span>`;
}

export function Editor({ text, onDone }) {
  const [value, setValue] = useState(text);
  const field = useRef();
  useEffect(() => field.current.focus(), []);
  const submit = (event) => {
    event.preventDefault();
    if (value.trim()) onDone(value);
  };
  const keys = (event) => {
    if (event.key === "Escape") onDone(null);
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  };
  return html`<form class="chat-editor" onSubmit=${submit}>
    <textarea
      ref=${field}
      aria-label="Edit the message"
      rows="3"
      value=${value}
      onInput=${(event) => setValue(event.target.value)}
      onKeyDown=${keys}
    ></textarea>
    <div>
      <button type="submit" class="primary" disabled=${!value.trim()}>Send</button>
      <button type="button" class="quiet" onClick=${() => onDone(null)}>Cancel</button>
    </div>
  </form>`;
}
