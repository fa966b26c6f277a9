// Where the messages of a chat are among the tokens of the prompt, which also has the tokens of the chat template.

// tokens: texts; returns for each message [first, end) as indices of tokens, or null if its text is not found, for
// instance because tokens are parts of characters.
export function messageSpans(tokens, messages) {
  const joined = tokens.join("");
  const starts = [];
  let position = 0;
  for (const token of tokens) {
    starts.push(position);
    position += token.length;
  }
  let from = 0;
  return messages.map((message) => {
    const text = message.trim();
    const at = text ? joined.indexOf(text, from) : -1;
    if (at < 0) return null;
    from = at + text.length;
    const first = starts.findLastIndex((start) => start <= at);
    const end = starts.findIndex((start) => start >= from);
    return [first, end < 0 ? tokens.length : end];
  });
}

// The tokens of a prompt as pieces, without probabilities.
export const promptPieces = ({ ids, tokens }, first, end) =>
  tokens.slice(first, end).map((text, i) => ({ text, tokens: [{ id: ids[first + i], text }] }));
