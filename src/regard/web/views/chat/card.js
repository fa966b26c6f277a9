// The card of a token: its probability, rank and alternatives. It follows the pointer; a click or Enter pins it, and
// then its alternatives are buttons from which the text continues.

import { bits, percent } from "../../draw/numbers.js";
import { html, signal, useEffect, useLayoutEffect, useRef, useSignal, useState } from "../../html.js";
import { select, selection } from "../../state.js";
import { visible } from "../../token_text.js";
import { scoreOf } from "./generation.js";

// {element, list, start, piece, pinned, selects: whether it has pinned the row of its token, number} or null. The
// number differs for every card, so that a card never shows the probabilities of the one before.
export const openedCard = signal(null);
let cards = 0;
let branchFrom = () => {};
export const setBranch = (callback) => (branchFrom = callback);

const probabilityOf = (logprob) => Math.exp(logprob);

export function openCard(element) {
  if (openedCard.value?.element === element) return;
  closeCard();
  const list = element.closest(".chat-tokens").tokenList;
  const start = Number(element.dataset.start);
  let position = 0;
  const piece = list.pieces.find((candidate) => {
    position += candidate.tokens.length;
    return position > start;
  });
  if (!piece) return;
  element.classList.add("chat-open");
  element.setAttribute("aria-describedby", "card");
  openedCard.value = { element, list, start, piece, pinned: false, selects: false, number: ++cards };
}

export function pinCard(selects) {
  if (openedCard.value) openedCard.value = { ...openedCard.value, pinned: true, selects };
}

export function closeCard() {
  const opened = openedCard.value;
  if (!opened) return;
  opened.element.classList.remove("chat-open");
  opened.element.removeAttribute("aria-describedby");
  openedCard.value = null;
}

// Closes the card, and its row is selected no more; a cell that is pinned in the map stays.
export function dismissCard() {
  const selects = openedCard.value?.selects;
  closeCard();
  if (selection.value.row !== null && (selects || !selection.value.pinned)) {
    select({ row: null, column: null, pinned: false });
  }
}

// The text has been scrolled: a pinned card follows its token.
export const followScroll = () => (openedCard.value?.pinned ? placeCard() : closeCard());

export function Card() {
  const opened = useSignal(openedCard);
  const card = useRef();
  useEffect(() => closeCard, []); // its token leaves the document with the view
  useLayoutEffect(() => {
    placeCard();
    if (opened?.pinned) card.current.focus({ preventScroll: true });
  }, [opened]);
  useEffect(() => {
    if (!opened?.pinned) return undefined;
    const outside = ({ target }) => card.current?.contains(target) || target.closest?.(".chat-token") || dismissCard();
    addEventListener("pointerdown", outside);
    return () => removeEventListener("pointerdown", outside);
  }, [opened]);
  if (!opened) return html`<div id="card" hidden></div>`;
  const back = () => {
    opened.element.focus();
    dismissCard();
  };
  const { pinned, piece, list, start, number } = opened;
  const name = `Token ${visible(piece.text)}`;
  return html`<div
    id="card"
    ref=${card}
    class=${pinned ? "chat-card chat-pinned" : "chat-card"}
    role=${pinned ? "dialog" : "tooltip"}
    aria-label=${pinned ? name : null}
    tabindex=${pinned ? -1 : null}
    onKeyDown=${(event) => event.key === "Escape" && back()}
  >
    ${
      pinned &&
      html`<button type="button" class="icon-button chat-close" aria-label="Close the card" onClick=${back}>×</button>`
    }
    ${piece.tokens.map((token, i) => {
      const facts = { token, position: start + i, pinned, source: list.source };
      return html`<${TokenFacts} key=${`${number} ${i}`} ...${facts} />`;
    })}
  </div>`;
}

// source: {node, index: of the column, prompt: whether the token belongs to the prompt, first: its index in the prompt,
// branches: whether the text can be continued from an alternative, refusal: why not, end: whether it is a stop token}
function TokenFacts({ token, position, source, pinned }) {
  const scored = usePromptScore(token, position, source);
  useLayoutEffect(placeCard, [scored]);
  const { logprob, rank, entropy, top = [] } = scored ?? token;
  const at = top.findIndex(({ id }) => id === token.id);
  const listed = at >= 0 || logprob === null || logprob === undefined ? top : [...top, { ...token, logprob }];
  return html`
    <p class="chat-card-title"><b>${visible(token.text)}</b><span>id ${token.id}</span></p>
    ${
      logprob === null || logprob === undefined
        ? html`<p class="muted">${source.prompt ? missing(scored, position, source) : "no probability"}</p>`
        : html`<dl class="chat-facts">
            <div>
              <dt>probability</dt>
              <dd>${percent(probabilityOf(logprob))}</dd>
            </div>
            <div>
              <dt>rank</dt>
              <dd>${rank?.toLocaleString("en") ?? (at >= 0 ? at + 1 : `over ${top.length}`)}</dd>
            </div>
            <div class=${entropy === undefined && "chat-fact-wide"}>
              <dt>surprisal</dt>
              <dd>${bits(-logprob).toFixed(1)} bits</dd>
            </div>
            ${
              entropy === undefined
                ? html`<div class="chat-fact-wide"
                  title="Of the most likely tokens, listed below, with their probabilities scaled to a sum of 1">
                    <dt>entropy of these ${top.length}</dt>
                    <dd>${entropyOf(top).toFixed(1)} bits</dd>
                  </div>`
                : html`<div class="chat-fact-wide" title="Of the probabilities of all tokens of the vocabulary: 0 if only one is possible">
                    <dt>entropy</dt>
                    <dd>${bits(entropy).toFixed(1)} bits</dd>
                  </div>`
            }
          </dl>`
    }
    ${
      listed.length > 0 &&
      html`<ul class="chat-alternatives" aria-label="Alternatives">
        ${listed.map((choice) => {
          const chosen = choice.id === token.id;
          return html`<${Alternative} key=${choice.id} ...${{ choice, chosen, position, source, pinned }} />`;
        })}
      </ul>`
    }
    ${listed.length > 0 && html`<${Hint} source=${source} pinned=${pinned} />`}
  `;
}

function Hint({ source, pinned }) {
  const choose = pinned ? "Choose a token to continue from it." : "Click to pin, then continue from one of the tokens.";
  const text = source.branches ? choose : source.refusal;
  return text && html`<p class="chat-hint">${text}</p>`;
}

function missing(scored, position, source) {
  if (source.unscored) return "a token of the source";
  if (source.first + position === 0) return "the first token has no probability";
  return scored?.failed ? "its probability could not be computed" : "computing its probability …";
}

// Probabilities of a prompt are computed when its first card opens.
function usePromptScore(token, position, source) {
  const [score, setScore] = useState(null);
  useEffect(() => {
    if (!source.prompt || source.unscored) return undefined;
    let current = true;
    const wait = setTimeout(() => {
      scoreOf(source.node).then(
        (scores) => current && setScore(scores[source.first + position]),
        () => current && setScore({ failed: true }),
      );
    }, 120); // not for every token that the pointer passes
    return () => {
      current = false;
      clearTimeout(wait);
    };
  }, [token, position, source.node]);
  return score;
}

function Alternative({ choice, chosen, position, source, pinned }) {
  const p = probabilityOf(choice.logprob);
  const parts = html`<span class="chat-fill" style=${{ width: `${(100 * p).toFixed(2)}%` }}></span>
    <span class="chat-alternative">${visible(choice.text)}</span><span class="number">${percent(p)}</span>`;
  const cls = chosen ? "chat-choice chat-chosen" : "chat-choice";
  if (!pinned || !source.branches || (chosen && source.end)) return html`<li class=${cls}>${parts}</li>`;
  const go = () => {
    closeCard();
    branchFrom(source, position, choice);
  };
  return html`<li>
    <button type="button" class=${cls} title="Continue from this token" onClick=${go}>${parts}</button>
  </li>`;
}

// In bits, of the shown alternatives, whose probabilities are scaled to 1: for tokens that an older version has stored.
function entropyOf(top) {
  const weights = top.map(({ logprob }) => Math.exp(logprob));
  const sum = weights.reduce((a, b) => a + b, 0);
  return weights.reduce((total, w) => (w > 0 ? total - (w / sum) * Math.log2(w / sum) : total), 0);
}

// Above its token, or below if there is no room.
function placeCard() {
  const card = document.getElementById("card");
  const rect = openedCard.value?.element.getClientRects()[0];
  if (!rect || card.hidden) return;
  const { offsetWidth: width, offsetHeight: height } = card;
  const left = Math.min(Math.max(rect.left, 8), innerWidth - width - 8);
  const above = rect.top - height - 8;
  const below = Math.min(rect.bottom + 8, innerHeight - height - 8);
  card.style.left = `${left}px`;
  card.style.top = `${above > 8 ? above : Math.max(below, 8)}px`;
}
