// The opened conversation and how it is kept: each conversation has its own key in localStorage, so that two tabs never
// overwrite each other's. The first line of a value is its title and time, the second the whole conversation.

import { signal } from "../../html.js";
import { isEmpty, merge, newConversation, path, textOf } from "./tree.js";

const PREFIX = "regard-chat ";
const OPENED = "regard-chat-opened";
const MAX_CHARACTERS = 4_000_000; // of all conversations; browsers keep about five million

export const conversation = signal(newConversation("chat"));
export const storageProblem = signal("");
export const listVersion = signal(0); // changes with the list of conversations

// Shows changes of the opened conversation, whose parts are changed in place.
export const touch = () => (conversation.value = { ...conversation.value });

export function open(opened) {
  conversation.value = opened;
  try {
    sessionStorage.setItem(OPENED, opened.id);
  } catch {
    // blocked: after a reload the page starts empty
  }
}

// The conversation that this tab had opened before it was reloaded, or null.
export function openedBefore() {
  try {
    return load(sessionStorage.getItem(OPENED));
  } catch {
    return null;
  }
}

export function load(id) {
  const value = localStorage.getItem(PREFIX + id);
  return value === null ? null : unpack(JSON.parse(value.slice(value.indexOf("\n") + 1)));
}

// [{id, title, mode, model, updated, size}], the newest first
export function list() {
  const found = [];
  for (let i = 0; i < localStorage.length; i++) {
    const key = localStorage.key(i);
    if (!key.startsWith(PREFIX)) continue;
    const value = localStorage.getItem(key);
    try {
      found.push({ ...JSON.parse(value.slice(0, value.indexOf("\n"))), size: value.length });
    } catch {
      // not ours
    }
  }
  return found.sort((a, b) => b.updated - a.updated);
}

export function save(model, kept = conversation.value) {
  if (isEmpty(kept)) return;
  kept.updated = Date.now();
  kept.title ||= titleOf(kept);
  const stored = load(kept.id);
  if (stored) merge(kept, stored); // another tab may have added to it
  const about = { id: kept.id, title: kept.title, mode: kept.mode, model, updated: kept.updated };
  write(kept.id, `${JSON.stringify(about)}\n${JSON.stringify(pack(kept))}`);
  listVersion.value++;
}

function titleOf(kept) {
  const text = textOf(path(kept.columns[0])[0]).trim().replace(/\s+/g, " ");
  return text.length > 60 ? `${text.slice(0, 59)}…` : text;
}

// Makes room by forgetting conversations, the oldest first.
function write(id, value) {
  const others = list().filter((other) => other.id !== id);
  let size = value.length + others.reduce((sum, other) => sum + other.size, 0);
  let forgotten = 0;
  while (others.length && size > MAX_CHARACTERS) {
    const oldest = others.pop();
    localStorage.removeItem(PREFIX + oldest.id);
    size -= oldest.size;
    forgotten++;
  }
  const full = "The browser's storage is full: this conversation is not kept. Export or delete some in History.";
  const removed = forgotten === 1 ? "the oldest conversation was" : `the ${forgotten} oldest conversations were`;
  storageProblem.value = forgotten ? `The history is full: ${removed} removed.` : "";
  try {
    if (value.length > MAX_CHARACTERS) throw new Error("too long");
    localStorage.setItem(PREFIX + id, value);
  } catch {
    storageProblem.value = full;
  }
}

export function rename(id, title) {
  const kept = id === conversation.value.id ? conversation.value : load(id);
  kept.title = title.trim() || titleOf(kept);
  const [about] = list().filter((other) => other.id === id);
  write(id, `${JSON.stringify({ ...about, size: undefined, title: kept.title })}\n${JSON.stringify(pack(kept))}`);
  listVersion.value++;
}

export function forget(ids) {
  for (const id of ids) localStorage.removeItem(PREFIX + id);
  listVersion.value++;
  if (ids.includes(conversation.value.id)) open(newConversation(conversation.value.mode));
}

// Another tab changed the history. The opened conversation gets what the other tab has added to it.
addEventListener("storage", ({ key, newValue }) => {
  if (!key?.startsWith(PREFIX)) return;
  listVersion.value++;
  const opened = conversation.value;
  if (!newValue || key !== PREFIX + opened.id) return;
  merge(opened, load(opened.id));
  touch();
});

// Tokens take most of the space: stored as [id, text, logprob, [id, text, logprob, …]].
const packToken = (token) => [token.id, token.text, token.logprob, token.top.flatMap((t) => [t.id, t.text, t.logprob])];

function unpackToken([id, text, logprob, flat]) {
  const top = [];
  for (let i = 0; i < flat.length; i += 3) top.push({ id: flat[i], text: flat[i + 1], logprob: flat[i + 2] });
  return { id, text, logprob, top };
}

const mapNodes = (kept, change) => ({
  ...kept,
  columns: kept.columns.map((column) => ({
    ...column,
    nodes: Object.fromEntries(Object.entries(column.nodes).map(([id, node]) => [id, change(node)])),
  })),
});

export const pack = (kept) =>
  mapNodes(kept, (node) =>
    node.role === "user"
      ? node
      : {
          ...node,
          pieces: node.pieces.map((piece) => [piece.text, piece.tokens.map(packToken)]),
          end: node.end && packToken(node.end),
        },
  );

export const unpack = (packed) =>
  mapNodes(packed, (node) =>
    node.role === "user"
      ? node
      : {
          ...node,
          pieces: node.pieces.map(([text, tokens]) => ({ text, tokens: tokens.map(unpackToken) })),
          end: node.end && unpackToken(node.end),
        },
  );
