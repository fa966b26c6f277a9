// A conversation as a tree of messages. Editing or regenerating a message adds a sibling; `chosen` says which sibling
// of each parent is shown.
//
// conversation: {id, title, mode, updated, columns}; mode: "chat" or "continue"
// column:       {model, system, nodes: {id: node}, chosen: {parent id or "": node id}}; model: null for the page's
// node:         {id, parent, role: "user", text}
//               {id, parent, role: "assistant", pieces, end, model, finish, count, seconds}
// piece:        {text, tokens}, a token: {id, text, logprob, rank, entropy, top: [{id, text, logprob}]}. A piece has
//               several tokens if they are parts of one character. `end` is the stop token, which has no text.

export const newId = () => `n${Math.random().toString(36).slice(2, 10)}${Date.now().toString(36)}`;
export const newColumn = (model = null) => ({ model, system: "", nodes: {}, chosen: {} });
export const newConversation = (mode) => ({ id: newId(), title: "", mode, updated: 0, columns: [newColumn()] });

export const children = (column, parent) => Object.values(column.nodes).filter((node) => node.parent === parent);
export const isEmpty = (conversation) => conversation.columns.every((column) => !Object.keys(column.nodes).length);

// The shown messages, from the first one to a leaf.
export function path(column) {
  const shown = [];
  for (let node = next(column, ""); node; node = next(column, node.id)) shown.push(node);
  return shown;
}

function next(column, parent) {
  const chosen = column.nodes[column.chosen[parent]];
  return chosen?.parent === parent ? chosen : children(column, parent).at(-1);
}

// The messages from the first one to `id`.
export function ancestors(column, id) {
  const line = [];
  for (let node = column.nodes[id]; node; node = column.nodes[node.parent]) line.unshift(node);
  return line;
}

export function add(column, parent, fields) {
  const node = { id: newId(), parent, ...fields };
  column.nodes[node.id] = node;
  column.chosen[parent] = node.id;
  return node;
}

// Removes a leaf. The sibling before it is shown again.
export function remove(column, node) {
  delete column.nodes[node.id];
  const left = children(column, node.parent);
  if (left.length) column.chosen[node.parent] = left.at(-1).id;
  else delete column.chosen[node.parent];
}

// Shows the sibling `step` places after this message.
export function chooseSibling(column, node, step) {
  const siblings = children(column, node.parent);
  const sibling = siblings[siblings.indexOf(node) + step];
  if (sibling) column.chosen[node.parent] = sibling.id;
}

export const textOf = (node) => (node.role === "user" ? node.text : node.pieces.map((piece) => piece.text).join(""));
export const tokensOf = (node) => node.pieces.flatMap((piece) => piece.tokens);

// The messages of a chat in OpenAI's format.
export function messagesOf(column, nodes) {
  const system = column.system.trim() ? [{ role: "system", content: column.system.trim() }] : [];
  return [...system, ...nodes.map((node) => ({ role: node.role, content: textOf(node) }))];
}

// The messages that this one continues in "continue" mode: the prompt and what was generated from it.
export function passageOf(nodes) {
  const start = nodes.findLastIndex((node) => node.role === "user");
  return nodes.slice(Math.max(start, 0));
}

// Adds the messages that another tab has added. Messages never change once they are complete, so nothing is lost.
export function merge(mine, other) {
  mine.columns.forEach((column, i) => {
    for (const node of Object.values(other.columns[i]?.nodes ?? {})) column.nodes[node.id] ??= node;
  });
}
