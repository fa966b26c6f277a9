// Conversations as files: JSON with every token, which can be imported again, and Markdown to read.

import { newId, path, textOf } from "./tree.js";
import { pack, save, unpack } from "./conversations.js";

const MAX_BYTES = 8_000_000;

// content: a list of conversations, or text
export function download(name, content) {
  const text = typeof content === "string" ? content : JSON.stringify({ regard: 1, conversations: content.map(pack) });
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/plain" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

export function asMarkdown(conversation) {
  const parts = [`# ${conversation.title}`];
  conversation.columns.forEach((column, i) => {
    if (conversation.columns.length > 1) parts.push(`# Column ${i + 1}`);
    if (column.system.trim()) parts.push("## System", column.system.trim());
    for (const node of path(column)) {
      const heading = node.role === "user" ? (conversation.mode === "chat" ? "You" : "Prompt") : node.model || "Model";
      parts.push(`## ${heading}`, textOf(node).trim());
    }
  });
  return `${parts.join("\n\n")}\n`;
}

// Adds the conversations of a file to the history, as new ones. Returns the first.
export async function importFile(file) {
  if (file.size > MAX_BYTES)
    throw new Error(`${file.name} has ${file.size} bytes; at most ${MAX_BYTES} can be imported.`);
  let conversations;
  try {
    const data = JSON.parse(await file.text());
    conversations = data.conversations.map((packed) => check({ ...unpack(packed), id: newId() }));
  } catch {
    throw new Error(`${file.name} is not a file of conversations; export one here as JSON.`);
  }
  for (const conversation of conversations) save("imported", conversation);
  return conversations[0];
}

// Throws if a conversation cannot be shown.
function check(conversation) {
  if (!["chat", "continue"].includes(conversation.mode) || !conversation.columns.length) throw new Error("mode");
  conversation.columns.length = Math.min(conversation.columns.length, 2);
  for (const column of conversation.columns) {
    for (const [id, node] of Object.entries(column.nodes)) if (!id || node.id !== id) throw new Error("id");
    column.system = String(column.system ?? "");
    column.chosen ??= {};
    path(column).map(textOf).join("").trim();
  }
  conversation.title = String(conversation.title ?? "");
  return conversation;
}
