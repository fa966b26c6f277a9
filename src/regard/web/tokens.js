// Generated tokens: tinted by surprisal, each with a card that lists its alternatives and their probabilities.
// The surprisal of a token is −log2 p, in bits: 0 for a certain token, 1 for a probability of one half.

const FULL_TINT = 5; // bits of surprisal with the strongest tint
const card = document.getElementById("card");
let opened = null; // the token with the card

export const bits = (logprob) => -logprob / Math.LN2;
export const visible = (text) =>
  text.replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "∅";

export function element(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text; // never parsed as HTML
  return node;
}

// Appends text with the tokens that it comes from: usually one, more if the server held text back. Each token has a
// separate element, unless the tokens are parts of characters, so that their texts do not add up to the text.
export function appendText(parent, text, tokens) {
  if (!text) return;
  const separate = tokens.map((token) => token.text).join("") === text;
  const parts = separate ? tokens.map((token) => [token.text, [token]]) : [[text, tokens]];
  for (const [part, partTokens] of parts) {
    const span = element("span", "token", part);
    const surprisal = partTokens.reduce((sum, token) => sum + bits(token.logprob), 0);
    span.style.setProperty("--surprisal", Math.min(surprisal / FULL_TINT, 1).toFixed(3));
    span.tabIndex = parent.querySelector(".token") ? -1 : 0; // Tab reaches the first token, arrow keys the others
    span.tokens = partTokens;
    parent.append(span);
  }
}

// Opens the card of the token that is pointed at or focused.
export function watchTokens(container) {
  container.addEventListener("pointerover", (event) => open(event.target.closest(".token")));
  container.addEventListener("pointerleave", close);
  container.addEventListener("focusin", (event) => open(event.target.closest(".token")));
  container.addEventListener("focusout", close);
  container.addEventListener("scroll", close);
  container.addEventListener("keydown", (event) => {
    const token = event.target.closest(".token");
    if (!token) return;
    if (event.key === "Escape") close();
    const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
    const next = step && token[step];
    if (!next?.classList.contains("token")) return;
    event.preventDefault();
    token.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
}

function close() {
  opened?.classList.remove("open");
  opened?.removeAttribute("aria-describedby");
  opened = null;
  card.hidden = true;
}

function open(span) {
  if (span === opened) return;
  close();
  if (!span) return;
  opened = span;
  span.classList.add("open");
  span.setAttribute("aria-describedby", "card");
  card.replaceChildren(...span.tokens.flatMap(alternatives));
  card.hidden = false;
  placeCard(span.getClientRects()[0]);
}

function alternatives(token) {
  const header = element("p", "card-header");
  header.append(element("span", "", "alternatives"), element("span", "", `surprisal ${bits(token.logprob).toFixed(1)} bits`));
  const rows = element("ul", "rows");
  const listed = token.top.some(({ text }) => text === token.text);
  for (const choice of listed ? token.top : [...token.top, token]) rows.append(row(choice, choice.text === token.text));
  return [header, rows];
}

function row({ text, logprob }, chosen) {
  const probability = Math.exp(logprob);
  const item = element("li", chosen ? "row chosen" : "row");
  const fill = element("span", "fill");
  fill.style.width = `${(100 * probability).toFixed(2)}%`;
  const percent = probability < 0.0005 ? "<0.1 %" : `${(100 * probability).toFixed(1)} %`;
  item.append(fill, element("span", "alternative", visible(text)), element("span", "probability", percent));
  return item;
}

function placeCard(rect) {
  const { offsetWidth: width, offsetHeight: height } = card;
  const left = Math.min(Math.max(rect.left, 8), window.innerWidth - width - 8);
  const above = rect.top - height - 8;
  card.style.left = `${left}px`;
  card.style.top = `${above > 8 ? above : rect.bottom + 8}px`;
}
