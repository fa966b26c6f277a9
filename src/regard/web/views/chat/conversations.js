// The opened conversation and how it is kept: each conversation has its own key in localStorage, so that two tabs never
// overwrite each other's. The first line of a value is its title and time, the second the whole conversation.

import { signal } from "../../html.js";
import { local, session } from "../../storage.js";
import { children, isEmpty, merge, newConversation, path, textOf } from "./tree.js";

const PREFIX = "regard-chat ";
const OPENED = "regard-chat-opened";
const MAX_CHARACTERS = 4_000_000; // of all conversations; browsers keep about five million
const forgotten = new Set(); // ids; the answer of a deleted conversation may still end, and must not bring it back

export const conversation = signal(newConversation("chat"));
export const storageProblem = signal("");
export const listVersion = signal(0); // changes with the list of conversations

// Shows changes of the opened conversation, whose parts are changed in place.
export const touch = () => (conversation.value = { ...conversation.value });

export function open(opened) {
  conversation.value = opened;
  session.write(OPENED, opened.id);
}

// The conversation that this tab had opened before it was reloaded, or null.
export const openedBefore = () => load(session.read(OPENED));

// null if there is none, or if what is stored cannot be read, as that of another version of the page
export function load(id) {
  const value = local.read(PREFIX + id);
  try {
    return value === null ? null : unpack(JSON.parse(value.slice(value.indexOf("\n") + 1)));
  } catch {
    return null;
  }
}

// [{id, title, mode, model, updated, size}], the newest first
export function list() {
  const found = [];
  for (const key of local.keys()) {
    if (!key.startsWith(PREFIX)) continue;
    const value = local.read(key);
    try {
      const { id, title, mode, model, updated } = JSON.parse(value.slice(0, value.indexOf("\n")));
      if (key === PREFIX + id) found.push({ id, title: String(title ?? ""), mode, model, updated, size: value.length });
    } catch {
      // not ours
    }
  }
  return found.sort((a, b) => b.updated - a.updated);
}

export function save(model, kept = conversation.value) {
  const stored = load(kept.id);
  if (stored) merge(kept, stored); // another tab may have added to it
  const packed = pack(kept);
  if (isEmpty(packed) || forgotten.has(kept.id)) return;
  packed.updated = kept.updated = Date.now();
  packed.title = kept.title = stored?.title || kept.title || titleOf(kept); // it may have been renamed meanwhile
  const about = { id: kept.id, title: kept.title, mode: kept.mode, model, updated: kept.updated };
  write(kept.id, `${JSON.stringify(about)}\n${JSON.stringify(packed)}`);
  listVersion.value++;
}

function titleOf(kept) {
  const text = textOf(kept.columns.flatMap(path)[0]).trim().replace(/\s+/g, " ");
  return text.length > 60 ? `${text.slice(0, 59)}…` : text;
}

// Makes room by forgetting conversations, the oldest first.
function write(id, value) {
  const others = list().filter((other) => other.id !== id);
  let size = value.length + others.reduce((sum, other) => sum + other.size, 0);
  let dropped = 0;
  while (others.length && size > MAX_CHARACTERS) {
    const oldest = others.pop();
    local.remove(PREFIX + oldest.id);
    size -= oldest.size;
    dropped++;
  }
  const full =
    "The browser's storage is full or blocked: this conversation is not kept. Export or delete some in History.";
  const removed = dropped === 1 ? "the oldest conversation was" : `the ${dropped} oldest conversations were`;
  storageProblem.value = dropped ? `The history is full: ${removed} removed.` : "";
  if (value.length > MAX_CHARACTERS || !local.write(PREFIX + id, value)) storageProblem.value = full;
}

export function rename(id, title) {
  const kept = id === conversation.value.id ? conversation.value : load(id);
  if (!kept) return;
  kept.title = title.trim() || titleOf(kept);
  const [about] = list().filter((other) => other.id === id);
  write(id, `${JSON.stringify({ ...about, size: undefined, title: kept.title })}\n${JSON.stringify(pack(kept))}`);
  listVersion.value++;
}

export function forget(ids) {
  for (const id of ids) {
    forgotten.add(id);
    local.remove(PREFIX + id);
  }
  listVersion.value++;
}

// Another tab changed the history. The opened conversation gets what the other tab has added to it.
addEventListener("storage", ({ key, newValue }) => {
  if (!key?.startsWith(PREFIX)) return;
  listVersion.value++;
  const opened = conversation.value;
  const stored = newValue && key === PREFIX + opened.id && load(opened.id);
  if (!stored) return;
  merge(opened, stored);
  touch();
});

// Tokens take most of the space: stored as [id, text, logprob, [id, text, logprob, …], rank, entropy].
function packToken({ id, text, logprob, top, rank, entropy }) {
  const flat = top.flatMap((other) => [other.id, other.text, other.logprob]);
  return [id, text, logprob, flat, rank ?? null, entropy ?? null];
}

function unpackToken([id, text, logprob, flat, rank, entropy]) {
  const top = [];
  for (let i = 0; i < flat.length; i += 3) top.push({ id: flat[i], text: flat[i + 1], logprob: flat[i + 2] });
  return { id, text, logprob, rank: rank ?? undefined, entropy: entropy ?? undefined, top };
}

// change: a node to another one, or null to leave it out
const mapNodes = (kept, change) => ({
  ...kept,
  columns: kept.columns.map((column) => {
    const changed = Object.entries(column.nodes).map(([id, node]) => [id, change(node, column)]);
    return { ...column, nodes: Object.fromEntries(changed.filter(([, node]) => node !== null)) };
  }),
});

// Leaves out an answer that is still generated, and a message that has no answer yet: both may fail and be removed, and
// what is stored once would come back when it is merged.
export const pack = (kept) =>
  mapNodes(kept, (node, column) => {
    if (node.role === "user") return children(column, node.id).some(isComplete) ? node : null;
    if (!isComplete(node)) return null;
    const pieces = node.pieces.map((piece) => [piece.text, piece.tokens.map(packToken)]);
    return { ...node, pieces, end: node.end && packToken(node.end) };
  });

export const unpack = (packed) =>
  mapNodes(packed, (node) => {
    if (node.role === "user") return node;
    const pieces = node.pieces.map(([text, tokens]) => ({ text, tokens: tokens.map(unpackToken) }));
    return { ...node, pieces, end: node.end && unpackToken(node.end) };
  });

const isComplete = (node) => node.role === "assistant" && node.finish !== null;
