// Generates answers: finds the ids of the prompt, streams tokens into a new message, and hands the result to the views
// that look inside the model.

import { ApiError, complete, describeModel, scorePrompt, tokenize } from "../../api.js";
import { signal } from "../../html.js";
import { model as pageModel, passage, select } from "../../state.js";
import { conversation, save, touch } from "./conversations.js";
import { requestFields, settingsOf } from "./settings.js";
import { add, ancestors, messagesOf, passageOf, path, remove, textOf, tokensOf } from "./tree.js";

export const running = signal(new Map()); // AbortController of each column that is generating
export const problems = signal({}); // error message by column
export const draft = signal(""); // the text of the composer, which gets back a prompt without an answer
// Node id: {ids, tokens, spans, scoring}, what the model has read before its answer; of the opened conversation.
const prompts = new Map();
const descriptions = new Map(); // model name: a promise of its description

export const promptOf = (node) => prompts.get(node.id);

// The model of a column: the page's, or another one that is compared with it.
export function describe(column) {
  const page = pageModel.value;
  if (!column.model || column.model === page.name) return page;
  if (!descriptions.has(column.model)) {
    const failed = (error) => (descriptions.delete(column.model), Promise.reject(error));
    descriptions.set(column.model, describeModel(column.model).catch(failed));
  }
  return descriptions.get(column.model);
}

// Adds a message of the user to every column, each after `parents[column]`, and generates the answers.
export async function send(text, parents) {
  const answers = conversation.value.columns.map((column, i) => {
    const asked = text ? add(column, parents[i], { role: "user", text }) : null;
    return answer(i, asked?.id ?? parents[i], { asked });
  });
  const answered = (await Promise.all(answers)).some(Boolean);
  if (!answered) draft.value ||= text;
}

export const stop = () => running.value.forEach((controller) => controller.abort());

// Another conversation is opened.
export function stopAndReset() {
  stop();
  [running.value, problems.value] = [new Map(), {}];
  prompts.clear();
}

// Generates a message after `parent`. kept: pieces that it begins with; asked: the message of the user that is removed
// again if there is no answer.
export async function answer(index, parent, { kept = [], asked = null } = {}) {
  const opened = conversation.value;
  const column = opened.columns[index];
  const controller = new AbortController();
  running.value = new Map(running.value).set(index, controller);
  problems.value = { ...problems.value, [index]: "" };
  const fields = { role: "assistant", pieces: [...kept], end: null, model: "", finish: null, count: 0, seconds: 0 };
  const node = add(column, parent, fields);
  touch();
  const start = performance.now();
  try {
    const model = await describe(column);
    node.model = model.name;
    const prompt = await readPrompt(opened.mode, column, parent, model, controller.signal);
    prompts.set(node.id, prompt);
    const ids = [...prompt.ids, ...kept.flatMap((piece) => piece.tokens.map((token) => token.id))];
    const sampling = requestFields(settingsOf(model, index));
    const available = model.context - (model.source ? 1 : ids.length);
    sampling.max_tokens = Math.max(1, Math.min(sampling.max_tokens, available));
    for await (const delta of complete(model.name, ids, sampling, controller.signal)) append(node, delta);
  } catch (error) {
    if (!controller.signal.aborted) fail(index, column, node, asked, error);
  } finally {
    node.seconds = (performance.now() - start) / 1000;
    running.value = new Map([...running.value].filter(([, other]) => other !== controller));
    node.finish ??= "stopped";
    save(pageModel.value.name, opened);
    showNow();
  }
  const answered = column.nodes[node.id] === node;
  if (answered && index === 0 && isOpen(opened)) showPassage(node);
  return answered;
}

// Another conversation may have been opened while a request was under way.
const isOpen = (opened) => conversation.value.id === opened.id;

function fail(index, column, node, asked, error) {
  node.finish = "failed";
  if (!node.count) {
    remove(column, node);
    if (asked) remove(column, asked);
  }
  if (!(error instanceof ApiError)) throw error; // an error of the page itself
  problems.value = { ...problems.value, [index]: error.message };
}

function append(node, { text, tokens, finish }) {
  node.finish = finish ?? null;
  node.count += tokens.length;
  if (finish === "stop") node.end = tokens.pop() ?? null;
  const whole = tokens.map((token) => token.text).join("") === text;
  if (whole) node.pieces.push(...tokens.map((token) => ({ text: token.text, tokens: [token] })));
  else if (tokens.length) node.pieces.push({ text, tokens }); // parts of characters
  showSoon();
}

// At most one update per frame while tokens arrive.
let waiting = 0;
const showSoon = () => (waiting ||= requestAnimationFrame(showNow));
function showNow() {
  cancelAnimationFrame(waiting);
  waiting = 0;
  touch();
}

// The tokens that the model reads before a message after `parent`. Generated tokens are taken as they are.
async function readPrompt(mode, column, parent, model, signal) {
  const before = ancestors(column, parent);
  if (mode === "chat") return tokenize(model.name, { messages: messagesOf(column, before) }, signal);
  const [first, ...rest] = passageOf(before);
  if (model.source) return tokenize(model.name, { text: first.text }, signal);
  if (rest.some((node) => node.model !== model.name)) {
    const { ids, tokens } = await tokenize(model.name, { text: [first, ...rest].map(textOf).join("") }, signal);
    return { ids, tokens, spans: [null] }; // answers of another model have no tokens of their own in it
  }
  const { ids, tokens, spans } = await tokenize(model.name, { text: first.text }, signal);
  const generated = rest.flatMap(tokensOf);
  return {
    ids: [...ids, ...generated.map((token) => token.id)],
    tokens: [...tokens, ...generated.map((token) => token.text)],
    spans,
  };
}

// After a reload the prompt of the last answer is computed again.
export async function restorePrompt(node) {
  const opened = conversation.value;
  const [column] = opened.columns;
  const model = pageModel.value;
  if (node.model !== model?.name || running.value.size) return;
  const prompt = prompts.get(node.id) ?? (await readPrompt(opened.mode, column, node.parent, model));
  if (!isOpen(opened)) return;
  prompts.set(node.id, prompt);
  if (path(column).at(-1) !== node || running.value.size) return; // another answer is shown meanwhile
  showPassage(node);
  touch();
}

// Hands the tokens of an answer and its prompt to the other views.
export function showPassage(node) {
  const prompt = prompts.get(node.id);
  const model = pageModel.value;
  if (!prompt || node.model !== model.name) return;
  const generated = tokensOf(node);
  const ids = [...prompt.ids, ...generated.map((token) => token.id)];
  if (passage.value?.ids.join() === ids.join()) return;
  select({ row: null, column: null, pinned: false });
  const tokens = [...prompt.tokens, ...generated.map((token) => token.text)];
  passage.value = { ids, tokens, generated: prompt.ids.length };
}

// The probabilities of the tokens of a prompt, computed when they are first asked for.
export async function scoreOf(node) {
  const prompt = prompts.get(node.id);
  prompt.scoring ??= scorePrompt(node.model, prompt.ids).catch((error) => {
    prompt.scoring = null; // the next card asks again
    throw error;
  });
  return prompt.scoring;
}

// A new branch: the text before a token, an alternative in its place, and what the model generates after it.
export function branch(index, node, position, alternative) {
  const kept = [];
  let left = position;
  for (const piece of node.pieces) {
    if (left <= 0) break;
    const tokens = piece.tokens.slice(0, left);
    kept.push({ text: tokens.length === piece.tokens.length ? piece.text : "", tokens });
    left -= tokens.length;
  }
  const { top, entropy } = tokensOf(node)[position] ?? node.end;
  const rank = top.findIndex(({ id }) => id === alternative.id) + 1 || undefined;
  const piece = { text: alternative.text, tokens: [{ ...alternative, rank: alternative.rank ?? rank, entropy, top }] };
  return answer(index, node.parent, { kept: [...kept, piece] });
}
