// The page: header, navigation, the view that the address names, and the dialog for the server's key.

import * as api from "./api.js";
import { html, render, useEffect, useRef, useSignal, useState } from "./html.js";
import { model, openModel, problem, route, stored } from "./state.js";

const VIEWS = {
  chat: "Chat",
  attention: "Attention",
  inside: "Inside",
  instruments: "Instruments",
  runs: "Runs",
  models: "Models",
};
const THEMES = ["auto", "light", "dark"];
const theme = stored("theme", "auto");
if (!THEMES.includes(theme.value)) theme.value = "auto";
theme.subscribe((value) => (document.documentElement.dataset.theme = value));

function App() {
  const refused = useSignal(api.keyRefused); // at the start, or later: the server may have been started again
  const wanted = useRef(); // the name of the model to open
  const start = async (name) => {
    wanted.current = name;
    try {
      await openModel(name);
    } catch (error) {
      if (!(error instanceof api.ApiError)) throw error;
      if (error.status === 401) return; // the dialog asks for the key
      if (error.status === 404 && name) await start(); // a model that is gone: the default takes its place
      problem.value = error.message;
    }
  };
  const onKey = async (key) => {
    api.setKey(key);
    if (model.value) await api.describeModel(model.value.name).catch(() => {}); // the views go on with this model
    else await start(wanted.current);
  };
  useEffect(() => void start(new URLSearchParams(location.search).get("model")), []);
  return html`
    <${Header} onModel=${start} />
    <${View} />
    ${refused && html`<${KeyDialog} message=${refused.message} onKey=${onKey} />`}
  `;
}

function Header({ onModel }) {
  const [name] = useSignal(route);
  return html`
    <header class="header">
      <a class="brand" href="#/chat"><img src="/web/icon.svg" alt="" width="28" height="28" /><span>regard</span></a>
      <nav class="views" aria-label="Views">
        ${Object.entries(VIEWS).map(
          ([id, title]) =>
            html`<a key=${id} href=${`#/${id}`} aria-current=${id === name ? "page" : null}>${title}</a>`,
        )}
      </nav>
      <${ModelName} onModel=${onModel} />
      <${ThemeButton} />
    </header>
  `;
}

function ModelName({ onModel }) {
  const opened = useSignal(model);
  if (!opened) return html`<p class="facts" id="facts">connecting …</p>`;
  if (opened.models.length === 1) return html`<p class="facts" id="facts"><b>${opened.name}</b></p>`;
  return html`<p class="facts" id="facts">
    <select id="model" aria-label="Model" value=${opened.name} onChange=${(event) => onModel(event.target.value)}>
      ${opened.models.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
    </select>
  </p>`;
}

function ThemeButton() {
  const chosen = useSignal(theme);
  const next = THEMES[(THEMES.indexOf(chosen) + 1) % THEMES.length];
  return html`<button
    class="icon-button"
    title=${`Theme: ${chosen}. Switch to ${next}`}
    aria-label=${`Theme: ${chosen}. Switch to ${next}`}
    onClick=${() => (theme.value = next)}
  >
    ${{ auto: "◐", light: "☀", dark: "☾" }[chosen]}
  </button>`;
}

// Views are loaded when they are first opened.
function View() {
  const [name, ...path] = useSignal(route);
  const failure = useSignal(problem);
  const [views, setViews] = useState({});
  const [missing, setMissing] = useState(""); // the view that could not be loaded
  const known = Object.hasOwn(VIEWS, name);
  useEffect(() => {
    setMissing("");
    if (!known || views[name]) return;
    import(`./views/${name}/index.js`).then(
      (module) => setViews((loaded) => ({ ...loaded, [name]: module.default })),
      () => setMissing(name),
    );
  }, [name]);
  const Current = views[name];
  return html`
    ${failure && html`<p class="problem" role="alert">${failure}</p>`}
    ${missing === name &&
    html`<p class="problem" role="alert">This view could not be loaded. Is the server still running?</p>`}
    <main id="view" class=${`view view-${known ? name : "unknown"}`}>
      <h1 class="visually-hidden">${known ? VIEWS[name] : "Not found"}</h1>
      ${known
        ? Current && html`<${Current} key=${name} path=${path} />`
        : html`<p class="notice">There is no view “${name}”. <a href="#/chat">Open the chat</a></p>`}
    </main>
  `;
}

function KeyDialog({ message, onKey }) {
  const dialog = useRef();
  const [key, setKey] = useState("");
  useEffect(() => void dialog.current.showModal(), []);
  const submit = (event) => {
    event.preventDefault();
    onKey(key);
  };
  return html`
    <dialog ref=${dialog} aria-labelledby="key-title" onCancel=${(event) => event.preventDefault()}>
      <form onSubmit=${submit}>
        <h2 id="key-title">This server requires an API key</h2>
        ${api.hasKey() && html`<p class="problem" role="alert">${message}</p>`}
        <label for="key">Key</label>
        <input
          type="password"
          id="key"
          autocomplete="off"
          required
          value=${key}
          onInput=${(event) => setKey(event.target.value)}
        />
        <button type="submit" class="primary">Connect</button>
      </form>
    </dialog>
  `;
}

render(html`<${App} />`, document.getElementById("page"));
