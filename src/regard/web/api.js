// The client of the server's public routes, one function per route. Errors are of the class ApiError.

import { decodeArrays } from "./arrays.js";
import { signal } from "./html.js";
import { session } from "./storage.js";

const TOP_LOGPROBS = 8;
let key = session.read("regard-key") ?? "";

// {message}, a new object for each request that the server refused without or with a wrong key; null: none
export const keyRefused = signal(null);

export class ApiError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export function setKey(value) {
  key = value;
  session.write("regard-key", value);
}

export const hasKey = () => key !== "";

export async function request(path, body, signal) {
  const sent = key;
  const headers = sent ? { authorization: `Bearer ${sent}` } : {};
  const options = { headers, signal };
  if (body) {
    options.method = "POST";
    options.body = JSON.stringify(body);
    headers["content-type"] = "application/json";
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    throw offline(error);
  }
  if (response.ok) {
    if (sent === key) keyRefused.value = null;
    return response;
  }
  const found = await response.json().catch(() => null); // a page of a proxy
  const message = found?.error?.message ?? `The server answered with the status ${response.status}.`;
  if (response.status === 401 && sent === key) keyRefused.value = { message };
  throw new ApiError(message, response.status, found?.error?.code);
}

// What a failed transfer means to the user; a request that the page has aborted stays an AbortError.
function offline(error) {
  if (error.name === "AbortError") return error;
  return new ApiError("The server cannot be reached. Is it still running?", 0, "offline");
}

export const requestJson = async (path, body, signal) => whole((await request(path, body, signal)).json());

// A body that may end early with the server, or be no JSON.
const whole = (reading) => reading.catch((error) => Promise.reject(offline(error)));

// model: its name; the server's first by default; passage: {text} or {messages}. Its tokens are {ids, tokens, spans}:
// spans has [first, end) of the text, or of each message, among the tokens, or null where it is not known.
export const describeModel = (model) =>
  requestJson("/regard/model" + (model ? `?model=${encodeURIComponent(model)}` : ""));
export const tokenize = (model, passage, signal) => requestJson("/regard/tokenize", { model, ...passage }, signal);

// Runs: {folder, runs, process, may_start}; positions: [{run, cursor}, …]
export const listRuns = (signal) => requestJson("/regard/runs", undefined, signal);
export const runMetrics = (positions, points, signal) =>
  requestJson("/regard/runs/metrics", { runs: positions, points }, signal);
export const runSamples = (run, signal) =>
  requestJson(`/regard/runs/samples?run=${encodeURIComponent(run)}`, undefined, signal);
export const startDemo = (run, steps) => requestJson("/regard/runs/start", steps ? { run, steps } : { run });
export const stopDemo = (run) => requestJson("/regard/runs/stop", { run });

// Attention as typed arrays. sequence: {model, ids, target}; layers: [first, end]; part: {layer, head, rows, columns,
// pool}. The overview is a list of layers with their arrays.
export async function attentionOverview(sequence, layers, signal) {
  const { layers: sizes, ...arrays } = await requestArrays(
    "/regard/attention/overview",
    { ...sequence, layers },
    signal,
  );
  const [offsets, next] = [{}, (name, count) => take(arrays, offsets, name, count)];
  return sizes.map(({ layer, heads, rows, columns }) => ({
    ...{ layer, heads, rows, columns },
    pixels: next("pixels", heads * rows * columns),
    second: next("second", heads * rows),
    scale: next("scale", heads),
    entropy: next("entropy", heads),
  }));
}
export const attentionHead = (sequence, part, signal) =>
  requestArrays("/regard/attention/head", { ...sequence, ...part }, signal);
export const headLabels = (model) => requestJson(`/regard/heads?model=${encodeURIComponent(model)}`);

async function requestArrays(path, body, signal) {
  return decodeArrays(await whole((await request(path, body, signal)).arrayBuffer()));
}

// The next `count` numbers of an array.
function take(arrays, offsets, name, count) {
  const start = offsets[name] ?? 0;
  offsets[name] = start + count;
  return arrays[name].subarray(start, start + count);
}
// instruments: the course, [{title, instruments}]; instrument: the panels of one for the given controls
export const instruments = async () => (await requestJson("/regard/instruments")).chapters;
export const instrument = (id, controls, model, signal) =>
  requestJson(`/regard/instruments/${encodeURIComponent(id)}`, { model, controls }, signal);

// Models: {served, available, loading, adapters, choices, may_load}; options: {model, context, batch, dtype, weights,
// device}
export const listModels = (signal) => requestJson("/regard/models", undefined, signal);
export const loadModel = (model) => requestJson("/regard/models/load", { model });
export const unloadModel = (model) => requestJson("/regard/models/unload", { model });
export const planModel = (options, signal) => requestJson("/regard/models/plan", options, signal);
export const verification = () => requestJson("/regard/models/verify");
export const verifyModel = (model) => requestJson("/regard/models/verify", { model });
export const stopVerifying = () => requestJson("/regard/models/verify/stop", {});
export const loadAdapter = (model, name) =>
  requestJson("/v1/load_lora_adapter", { model, lora_name: name, lora_path: name });
export const unloadAdapter = (name) => requestJson("/v1/unload_lora_adapter", { lora_name: name });

// The inside of a model: its parts at a length of sequence, and the events of the lens and of patching.
export const describeParts = (model, length, signal) =>
  requestJson(`/regard/spec?model=${encodeURIComponent(model)}&length=${length}`, undefined, signal);
export const lensEvents = (body, signal) => eventsOf("/regard/lens", body, signal);
export const patchEvents = (body, signal) => eventsOf("/regard/patch", body, signal);

async function* eventsOf(path, body, signal) {
  const response = await request(path, body, signal);
  for await (const event of events(response.body)) {
    if (event.error) throw new ApiError(event.error.message, 200, event.error.code);
    yield event;
  }
}

// Continues a prompt of ids, which is exact where encoding its text again may give other tokens. sampling: OpenAI's
// fields. Yields {text, tokens, finish}; a token is {id, text, logprob, rank, entropy, top: [{id, text, logprob}, …]},
// the most likely one first; the entropy is that of the whole distribution, in nats. The last token of a text that the
// model ended is the stop token, which has no text.
export async function* complete(model, ids, sampling, signal) {
  const body = { model, prompt: ids, ...sampling, stream: true, logprobs: TOP_LOGPROBS, return_token_ids: true };
  const response = await request("/v1/completions", body, signal);
  for await (const chunk of events(response.body)) {
    if (chunk.error) throw new ApiError(chunk.error.message, 200, chunk.error.code);
    const [{ text, logprobs, finish_reason }] = chunk.choices;
    yield { text, tokens: logprobs.content.map(readToken), finish: finish_reason };
  }
}

// The tokens of a prompt of ids with their probabilities; the first one has none.
export async function scorePrompt(model, ids, signal) {
  const body = { model, prompt: ids, echo: true, max_tokens: 0, logprobs: TOP_LOGPROBS, return_token_ids: true };
  const { choices } = await requestJson("/v1/completions", body, signal);
  return choices[0].logprobs.content.map(readToken);
}

const round = (logprob) => (logprob === null ? null : Math.round(logprob * 1e4) / 1e4);

function readToken({ id, token, logprob, rank, entropy, top_logprobs }) {
  const top = top_logprobs.map((other) => ({ id: other.id, text: other.token, logprob: round(other.logprob) }));
  return { id, text: token, logprob: round(logprob), rank, entropy: round(entropy ?? null) ?? undefined, top };
}

async function* events(body) {
  let incomplete = "";
  for await (const text of read(body.pipeThrough(new TextDecoderStream()))) {
    const blocks = (incomplete + text).split("\n\n");
    incomplete = blocks.pop();
    for (const block of blocks) {
      if (block === "data: [DONE]") return;
      if (block.startsWith("data: ")) yield JSON.parse(block.slice(6));
    }
  }
  throw new ApiError("The connection ended before the response did. Is the server still running?", 0, "offline");
}

// Safari cannot iterate over a stream with `for await`.
async function* read(stream) {
  const reader = stream.getReader();
  const next = () => reader.read().catch((error) => Promise.reject(offline(error))); // the server may end meanwhile
  try {
    for (let part = await next(); !part.done; part = await next()) yield part.value;
  } finally {
    reader.cancel().catch(() => {}); // of a stream that has failed
  }
}
