// The list of conversations that the browser keeps: open, rename, delete, export, import.

import { html, useEffect, useMemo, useRef, useSignal, useState } from "../../html.js";
import { list, listVersion, load, rename, storageProblem } from "./conversations.js";
import { asMarkdown, download, importFile } from "./exports.js";
import { discard, switchTo } from "./switching.js";

const EXPORTS = [
  ["JSON", "json", (stored) => [stored]],
  ["Markdown", "md", asMarkdown],
]; // format, ending of the file, its contents

// opened: the id of the opened conversation
export function History({ opened, onClose }) {
  const version = useSignal(listVersion);
  const [sure, setSure] = useState(false);
  const [problem, setProblem] = useState("");
  const picker = useRef();
  const kept = useMemo(list, [version]); // not for every token that arrives
  const read = async (event) => {
    const [file] = event.target.files;
    event.target.value = "";
    if (!file) return;
    try {
      setProblem("");
      const imported = await importFile(file);
      if (imported) switchTo(imported);
    } catch (error) {
      setProblem(error.message);
    }
  };
  const all = () =>
    download(
      "regard-conversations.json",
      kept.map(({ id }) => load(id)).filter(Boolean),
    );
  const clear = () => (sure ? (discard(kept.map(({ id }) => id)), setSure(false)) : setSure(true));
  return html`<aside class="chat-history" aria-label="History">
    <header>
      <h2>History</h2>
      <button type="button" class="icon-button" aria-label="Close the history" onClick=${onClose}>×</button>
    </header>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    ${kept.length === 0 && html`<p class="muted">Conversations are kept here, in this browser only.</p>`}
    <ul>
      ${kept.map(
        (about) =>
          html`<${Entry} key=${about.id} about=${about} current=${about.id === opened} onProblem=${setProblem} />`,
      )}
    </ul>
    <footer>
      <button type="button" onClick=${() => picker.current.click()}>Import</button>
      <input ref=${picker} type="file" accept=".json,application/json" hidden onChange=${read} />
      ${
        kept.length > 0 &&
        html`<button type="button" onClick=${all}>Export all</button>
          <button type="button" class=${sure ? "chat-danger" : ""} onClick=${clear} onBlur=${() => setSure(false)}>
            ${sure ? `Delete all ${kept.length}?` : "Clear all"}
          </button>`
      }
    </footer>
  </aside>`;
}

function Entry({ about, current, onProblem }) {
  const [renaming, setRenaming] = useState(false);
  const { id, title, mode, model, updated } = about;
  const name = title || "Untitled";
  const use = (action) => () => {
    const kept = load(id);
    onProblem(kept ? "" : `“${name}” cannot be read: it is damaged, or of another version. You can delete it.`);
    if (kept) action(kept);
  };
  return html`<li class=${current ? "chat-entry chat-current" : "chat-entry"}>
    ${
      renaming
        ? html`<${Rename} title=${title} onDone=${(text) => (setRenaming(false), text !== null && rename(id, text))} />`
        : html`<button
            type="button"
            class="chat-entry-title"
            aria-current=${current || null}
            onClick=${() => current || use(switchTo)()}
          >
            <span>${name}</span><small class="muted">${mode} · ${model} · ${new Date(updated).toLocaleString()}</small>
          </button>`
    }
    <div class="chat-entry-actions">
      <button type="button" class="quiet" aria-label=${`Rename ${name}`} onClick=${() => setRenaming(true)}>
        Rename
      </button>
      ${EXPORTS.map(
        ([format, ending, contents]) => html`<button
          key=${format}
          type="button"
          class="quiet"
          aria-label=${`Export ${name} as ${format}`}
          onClick=${use((kept) => download(`${fileName(name)}.${ending}`, contents(kept)))}
        >
          ${format}
        </button>`,
      )}
      <button type="button" class="quiet" aria-label=${`Delete ${name}`} onClick=${() => discard([id])}>Delete</button>
    </div>
  </li>`;
}

function Rename({ title, onDone }) {
  const [text, setText] = useState(title);
  const field = useRef();
  const isDone = useRef(false);
  useEffect(() => field.current.select(), []);
  const done = (result) => {
    if (isDone.current) return; // a field that is removed may lose the focus once more
    isDone.current = true;
    onDone(result);
  };
  return html`<form onSubmit=${(event) => (event.preventDefault(), done(text))}>
    <input
      ref=${field}
      type="text"
      aria-label="Title"
      value=${text}
      onInput=${(event) => setText(event.target.value)}
      onKeyDown=${(event) => event.key === "Escape" && done(null)}
      onBlur=${() => done(text)}
    />
  </form>`;
}

const fileName = (title) =>
  title
    .replace(/[^\p{L}\p{N}]+/gu, "-")
    .slice(0, 40)
    .replace(/^-|-$/g, "") || "conversation";

export function StorageNotice() {
  const message = useSignal(storageProblem);
  return message && html`<p class="problem" role="status">${message}</p>`;
}
