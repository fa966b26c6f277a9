// Tokens as elements: tinted by surprisal, or by the attention weights of the selected row. One tab stop per list;
// arrow keys move between tokens. Events are handled for a whole column, so pointing at a token renders nothing again.
// The surprisal of a token is −log2 p, in bits: 0 for a certain token, 1 for a probability of one half.

import { bits } from "../../draw/numbers.js";
import { tintShares } from "../../draw/tint_shares.js";
import { html, useMemo } from "../../html.js";
import { passage, select, selection } from "../../state.js";
import { closeCard, dismissCard, openCard, openedCard, pinCard } from "./card.js";

const FULL_TINT = 5; // bits of surprisal with the strongest tint
const CHUNK = 64; // tokens that are rendered together, so that a new token touches only the last ones

// pieces: as in tree.js; trim: without the space before the first word; offset: index of the first token in the
// passage, or null; source: what the card of a token needs (card.js)
export function Tokens({ pieces, offset = null, trim = false, label, source }) {
  const chunks = [];
  let position = 0;
  for (let i = 0; i < pieces.length; i += CHUNK) {
    const part = pieces.slice(i, i + CHUNK);
    const first = trim && i === 0;
    chunks.push(html`<${Chunk} key=${i} part=${part} position=${position} trim=${first} offset=${offset} />`);
    for (const piece of part) position += piece.tokens.length;
  }
  const keep = (element) => element && (element.tokenList = { pieces, source });
  return html`<span class="chat-tokens" role="group" aria-label=${label} ref=${keep}>${chunks}</span>`;
}

function Chunk({ part, position, trim, offset }) {
  return useMemo(() => {
    let at = position;
    return part.map((piece, i) => {
      const start = at;
      at += piece.tokens.length;
      const surprisal = piece.tokens.reduce((sum, { logprob }) => sum + bits(-(logprob ?? 0)), 0);
      return html`<span
        class=${piece.text.includes("\n") ? "chat-token chat-line-break" : "chat-token"}
        tabindex=${start === 0 ? 0 : -1}
        data-start=${start}
        data-row=${offset === null ? null : offset + start}
        style=${{ "--surprisal": Math.min(surprisal / FULL_TINT, 1).toFixed(3) }}
        >${trim && i === 0 ? piece.text.replace(/^ /, "") : piece.text}</span
      >`;
    });
  }, [part[0], part.length, position, trim, offset]);
}

// The tokens of a prompt as pieces, without probabilities.
export const promptPieces = ({ ids, tokens }, first, end) =>
  tokens.slice(first, end).map((text, i) => ({ text, tokens: [{ id: ids[first + i], text }] }));

// The handlers of an element that contains lists of tokens.
export const handlers = {
  onPointerOver(event) {
    const token = event.target.closest(".chat-token");
    if (event.pointerType === "touch") return;
    if (openedCard.value?.pinned) return;
    if (token) point(token);
    else dismissCard();
  },
  onPointerLeave: () => openedCard.value?.pinned || dismissCard(),
  onFocusIn(event) {
    const token = event.target.closest(".chat-token");
    const fromCard = event.relatedTarget?.closest?.("#card"); // Escape closed it
    if (token?.matches(":focus-visible") && !fromCard) point(token);
  },
  onFocusOut: () => openedCard.value?.pinned || closeCard(),
  onClick(event) {
    const token = event.target.closest(".chat-token");
    if (!token || getSelection().toString()) return;
    choose(token);
  },
  onKeyDown(event) {
    const token = event.target.closest(".chat-token");
    if (!token) return;
    if (event.key === "Enter" || event.key === " ") choose(token);
    else if (event.key === "Escape") dismissCard();
    else if (!move(token, event.key)) return;
    event.preventDefault();
  },
};

// The row of the attention map that belongs to a token, or null.
function rowOf(token) {
  const linked = token.dataset.row !== undefined && token.closest("[data-linked]");
  return linked ? Number(token.dataset.row) : null;
}

// A cell that is pinned in the map stays selected.
function point(token) {
  openCard(token);
  const row = rowOf(token);
  if (row !== null && !selection.value.pinned) select({ row, column: null });
}

function choose(token) {
  const row = rowOf(token);
  openCard(token);
  pinCard(row !== null);
  if (row !== null) select({ row, column: null, pinned: true });
}

function move(token, key) {
  const tokens = [...token.closest(".chat-tokens").querySelectorAll(".chat-token")];
  const at = tokens.indexOf(token);
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tokens.length - 1 }[key];
  if (to === undefined) return false;
  const next = tokens[to];
  if (!next) return true;
  token.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
  return true;
}

// Marks the selected row and column of the attention map in the text, and tints tokens by the weights of the row, if
// they are known: one for each token of the passage. Only what changes is set: a style takes longer than a comparison.
export function mark(thread, { row, column }, weights) {
  const weighted = weights !== null && row !== null && passage.value !== null;
  const shares = weighted ? tintShares(weights) : [];
  const loading = weights === null && row !== null; // keeps the tint of the row before
  if (!loading) thread.classList.toggle("chat-weighted", weighted);
  for (const token of thread.querySelectorAll(".chat-query, .chat-key"))
    token.classList.remove("chat-query", "chat-key");
  for (const token of row === null && column === null ? [] : thread.querySelectorAll("[data-row]")) {
    const at = Number(token.dataset.row);
    if (at === row) token.classList.add("chat-query");
    if (at === column) token.classList.add("chat-key");
    if (weighted) setWeight(token, Math.round(50 * (shares[at] ?? 0)) / 50);
  }
}

function setWeight(token, weight) {
  if ((token.weight ?? 0) === weight) return;
  token.weight = weight;
  token.style.setProperty("--weight", weight);
}
