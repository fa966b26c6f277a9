// Talking to the server: only its public routes. A stream of either kind comes out as {text, tokens, finish, usage},
// a token as {text, logprob, top: [{text, logprob}, …]} with the likeliest alternative first.

const TOP = 8;
let key = sessionStorage.getItem("regard-key") ?? "";

export class ApiError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export function useKey(value) {
  key = value;
  sessionStorage.setItem("regard-key", value);
}

async function call(path, body, signal) {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
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
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Is it still running?", 0, "offline");
  }
  if (response.ok) return response;
  const { error } = await response.json();
  throw new ApiError(error.message, response.status, error.code);
}

const answer = async (path, body, signal) => (await call(path, body, signal)).json();

export const describeModel = () => answer("/regard/model");
export const tokenize = (passage, signal) => answer("/regard/tokenize", passage, signal);
export const attention = (passage, place, signal) => answer("/regard/attention", { ...passage, ...place }, signal);

// passage: {text} or {messages}; sampling: OpenAI's fields
export async function* generate(model, passage, sampling, signal) {
  const shared = { model, ...sampling, stream: true, stream_options: { include_usage: true } };
  const [path, body, read] = passage.messages
    ? ["/v1/chat/completions", { ...shared, messages: passage.messages, logprobs: true, top_logprobs: TOP }, readChat]
    : ["/v1/completions", { ...shared, prompt: passage.text, logprobs: TOP }, readCompletion];
  const response = await call(path, body, signal);
  for await (const chunk of events(response.body)) {
    if (chunk.error) throw new ApiError(chunk.error.message, 200, chunk.error.code);
    const choice = chunk.choices[0];
    yield choice ? { ...read(choice), finish: choice.finish_reason } : { text: "", tokens: [], usage: chunk.usage };
  }
}

function readChat({ delta, logprobs }) {
  const tokens = (logprobs?.content ?? []).map((token) => ({
    text: token.token,
    logprob: token.logprob,
    top: token.top_logprobs.map(({ token: text, logprob }) => ({ text, logprob })),
  }));
  return { text: delta.content ?? "", tokens };
}

function readCompletion({ text, logprobs }) {
  const tokens = (logprobs?.tokens ?? []).map((piece, i) => ({
    text: piece,
    logprob: logprobs.token_logprobs[i],
    top: Object.entries(logprobs.top_logprobs[i])
      .map(([alternative, logprob]) => ({ text: alternative, logprob }))
      .sort((a, b) => b.logprob - a.logprob),
  }));
  return { text, tokens };
}

async function* events(body) {
  let rest = "";
  for await (const bytes of read(body.pipeThrough(new TextDecoderStream()))) {
    const blocks = (rest + bytes).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      if (block === "data: [DONE]") return;
      if (block.startsWith("data: ")) yield JSON.parse(block.slice(6));
    }
  }
}

// Safari has no async iteration of streams.
async function* read(stream) {
  const reader = stream.getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) yield part.value;
}
