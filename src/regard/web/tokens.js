// Generated tokens on the page: tinted by surprise, and each with a card of what else the model considered.
// Surprise in bits is −log2 p: 0 when the model was sure, 1 for a coin toss.

const FULL_TINT = 5; // bits
const card = document.getElementById("card");
let shown = null;

export const bits = (logprob) => -logprob / Math.LN2;
export const visible = (text) =>
  text.replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "∅";

export function element(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text; // never parsed as HTML, whatever the model wrote
  return node;
}

// A stretch of text with the tokens it came from. Usually one; several where half characters or possible stop strings
// were held back, and then they are told apart again if their texts add up.
export function append(parent, text, tokens) {
  if (!text) return;
  const separate = tokens.map((token) => token.text).join("") === text;
  const parts = separate ? tokens.map((token) => [token.text, [token]]) : [[text, tokens]];
  for (const [piece, from] of parts) {
    const span = element("span", "token", piece);
    const surprise = from.reduce((sum, token) => sum + bits(token.logprob), 0);
    span.style.setProperty("--surprise", Math.min(surprise / FULL_TINT, 1).toFixed(3));
    span.tabIndex = parent.querySelector(".token") ? -1 : 0; // one stop for Tab, arrows inside
    span.tokens = from;
    parent.append(span);
  }
}

export function watch(container) {
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
  shown?.classList.remove("open");
  shown?.removeAttribute("aria-describedby");
  shown = null;
  card.hidden = true;
}

function open(span) {
  if (span === shown) return;
  close();
  if (!span) return;
  shown = span;
  span.classList.add("open");
  span.setAttribute("aria-describedby", "card");
  card.replaceChildren(...span.tokens.flatMap(alternatives));
  card.hidden = false;
  place(span.getClientRects()[0]);
}

function alternatives(token) {
  const head = element("p", "surprise");
  head.append(element("span", "", "considered here"), element("span", "", `surprise ${bits(token.logprob).toFixed(1)} bits`));
  const rows = element("ul", "rows");
  const taken = token.top.some(({ text }) => text === token.text);
  for (const choice of taken ? token.top : [...token.top, token]) rows.append(row(choice, choice.text === token.text));
  return [head, rows];
}

function row({ text, logprob }, chosen) {
  const share = Math.exp(logprob);
  const item = element("li", chosen ? "row chosen" : "row");
  const fill = element("span", "fill");
  fill.style.width = `${(100 * share).toFixed(2)}%`;
  const percent = share < 0.0005 ? "<0.1 %" : `${(100 * share).toFixed(1)} %`;
  item.append(fill, element("span", "piece", visible(text)), element("span", "share", percent));
  return item;
}

function place(rect) {
  const { offsetWidth: width, offsetHeight: height } = card;
  const left = Math.min(Math.max(rect.left, 8), window.innerWidth - width - 8);
  const above = rect.top - height - 8;
  card.style.left = `${left}px`;
  card.style.top = `${above > 8 ? above : rect.bottom + 8}px`;
}
