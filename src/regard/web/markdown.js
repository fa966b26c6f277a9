// Markdown as elements: marked's lexer finds the structure, and this module builds the elements itself. No string is
// parsed as HTML: HTML in the text is shown as text, images become links, and links lead only to http and https.

import { CopyButton } from "./copying.js";
import { html, useMemo } from "./html.js";
import { lexer } from "./vendor/marked.js";

const MAX_DEPTH = 40; // of lists in quotes in lists; deeper elements would exceed the browser's stack
let depth = 0;

export function Markdown({ text }) {
  // computed once: a page with many answers is rendered for every token of the last one
  const content = useMemo(() => read(text), [text]);
  return html`<div class="markdown">${content}</div>`;
}

function read(text) {
  try {
    depth = 0;
    return blocks(lexer(text));
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
    return html`<p class="plain">${text}</p>`; // nested too deeply
  }
}

const blocks = nested((token) => BLOCKS[token.type]?.(token) ?? inline([token]));
const inline = nested((token) => INLINE[token.type]?.(token) ?? unescape(token.raw));

function nested(build) {
  return (tokens) => {
    if (depth === MAX_DEPTH) throw new RangeError("nested too deeply");
    depth += 1;
    const built = tokens.map(build);
    depth -= 1;
    return built;
  };
}

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
  const name = (language ?? "").split(/\s/)[0];
  return html`<figure class="code">
    <figcaption>${name || "code"}<${CopyButton} text=${text} /></figcaption>
    <pre tabindex="0" aria-label=${`Code ${name}`}><code>${text}</code></pre>
  </figure>`;
}

// Markdown has HTML's entities.
const ENTITIES = { "&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#39;": "'" };
const unescape = (text) => text.replace(/&(amp|lt|gt|quot|#39);/g, (entity) => ENTITIES[entity]);
