// Markdown as elements: marked's lexer finds the structure, and this module builds the elements itself. No string is
// parsed as HTML: HTML in the text is shown as text, images become links, and links lead only to http and https.

import { html } from "./html.js";
import { lexer } from "./vendor/marked.js";

export const Markdown = ({ text }) => html`<div class="markdown">${blocks(lexer(text))}</div>`;

const blocks = (tokens) => tokens.map((token) => BLOCKS[token.type]?.(token) ?? inline([token]));
const inline = (tokens) => tokens.map((token) => INLINE[token.type]?.(token) ?? unescape(token.raw));

const BLOCKS = {
  space: () => null,
  def: () => null,
  hr: () => html`<hr />`,
  paragraph: ({ tokens }) => html`<p>${inline(tokens)}</p>`,
  html: ({ text }) => html`<p>${text}</p>`,
  code: ({ text, lang }) => html`<${Code} text=${text} language=${lang} />`,
  blockquote: ({ tokens }) => html`<blockquote>${blocks(tokens)}</blockquote>`,
  text: ({ tokens, text }) => (tokens ? inline(tokens) : unescape(text)),
  // One level for all: a document must not skip levels, and models do.
  heading: ({ tokens, depth }) =>
    html`<p class=${`heading heading-${depth}`} role="heading" aria-level="3">${inline(tokens)}</p>`,
  list: ({ ordered, start, items }) =>
    ordered
      ? html`<ol start=${start}>
          ${items.map(item)}
        </ol>`
      : html`<ul>
          ${items.map(item)}
        </ul>`,
  table: ({ header, rows }) =>
    html`<div class="table" tabindex="0" role="region" aria-label="Table">
      <table>
        <thead>
          <tr>
            ${header.map((cell) => html`<th>${inline(cell.tokens)}</th>`)}
          </tr>
        </thead>
        <tbody>
          ${rows.map(
            (row) =>
              html`<tr>
                ${row.map((cell) => html`<td>${inline(cell.tokens)}</td>`)}
              </tr>`,
          )}
        </tbody>
      </table>
    </div>`,
};

const item = ({ tokens }) => html`<li>${blocks(tokens)}</li>`;

const INLINE = {
  text: ({ tokens, text }) => (tokens ? inline(tokens) : unescape(text)),
  escape: ({ text }) => unescape(text),
  html: ({ raw }) => raw,
  strong: ({ tokens }) => html`<strong>${inline(tokens)}</strong>`,
  em: ({ tokens }) => html`<em>${inline(tokens)}</em>`,
  del: ({ tokens }) => html`<del>${inline(tokens)}</del>`,
  codespan: ({ text }) => html`<code>${text}</code>`,
  checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  br: () => html`<br />`,
  link: ({ href, tokens }) => link(href, inline(tokens)),
  image: ({ href, text }) => link(href, `image: ${unescape(text) || href}`),
};

function link(href, content) {
  if (!/^https?:\/\//i.test(href)) return html`<span>${content} (${href})</span>`;
  return html`<a href=${href} target="_blank" rel="noreferrer noopener">${content}</a>`;
}

function Code({ text, language }) {
  const copy = (event) => {
    const button = event.target;
    navigator.clipboard?.writeText(text).then(() => {
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
  };
  const name = (language ?? "").split(/\s/)[0];
  return html`<figure class="code">
    <figcaption>${name || "code"}<button type="button" class="quiet" onClick=${copy}>Copy</button></figcaption>
    <pre tabindex="0" aria-label=${`Code ${name}`}><code>${text}</code></pre>
  </figure>`;
}

// Markdown has HTML's entities.
const ENTITIES = { "&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#39;": "'" };
const unescape = (text) => text.replace(/&(amp|lt|gt|quot|#39);/g, (entity) => ENTITIES[entity]);
