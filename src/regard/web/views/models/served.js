// The models that the server has now: sizes, adapters, and a button to remove each.

import * as api from "../../api.js";
import { html, useSignal, useState } from "../../html.js";
import { Choice } from "../../controls.js";
import { bytes, compact } from "../../draw/numbers.js";
import { goTo, model, openModel } from "../../state.js";
import { change, listed } from "./store.js";

export function Served() {
  const { served, adapters, may_load: mayLoad } = useSignal(listed);
  const opened = useSignal(model);
  return html`<section aria-labelledby="models-served">
    <h2 id="models-served">Served now</h2>
    <ul class="models-cards">
      ${served.map(
        (each) =>
          html`<${Card}
            key=${each.model}
            served=${each}
            opened=${opened?.name === each.model}
            last=${served.length === 1}
            adapters=${adapters}
            mayLoad=${mayLoad}
          />`,
      )}
    </ul>
  </section>`;
}

function Card({ served, opened, last, adapters, mayLoad }) {
  const [removing, setRemoving] = useState(false);
  const open = (name) => change(() => openModel(name).then(() => goTo("chat")));
  const remove = async () => {
    setRemoving(true);
    await change(() => api.unloadModel(served.model));
    setRemoving(false);
  };
  return html`<li class="panel models-card">
    <div class="models-title">
      <h3>${served.model}</h3>
      <span class="models-tag">${served.does}</span>
      ${opened && html`<span class="models-tag on">open</span>`}
    </div>
    <dl class="models-facts">
      <${Fact} name="Parameters" value=${served.parameters && compact(served.parameters)} />
      <${Fact} name="Weights" value=${served.bytes && bytes(served.bytes)} />
      <${Fact} name="Cache, at most" value=${served.cache_bytes && bytes(served.cache_bytes)} />
      <${Fact} name="Context" value=${served.context && `${served.context.toLocaleString("en")} tokens`} />
      <${Fact} name="Precision" value=${served.dtype && `${served.dtype} on ${served.device}`} />
      <${Fact} name="Concurrent requests" value=${served.rows && `up to ${served.rows}`} />
    </dl>
    ${served.adapters.length > 0 && html`<${Adapters}
      names=${served.adapters}
      removable=${adapters !== null && mayLoad}
      onOpen=${open}
    />`}
    ${adapters !== null && served.loads_adapters && html`<${LoadAdapter} served=${served} adapters=${adapters} />`}
    <div class="models-buttons">
      <button type="button" class=${opened ? "" : "primary"} onClick=${() => open(served.model)}>
        ${["chat", "completion", "chat with images", "text to text"].includes(served.does) ? "Open in chat" : "Open"}
      </button>
      ${mayLoad &&
      html`<button
        type="button"
        class="quiet"
        disabled=${last || removing}
        title=${last ? "The last model stays; load another one first" : "Remove it from the server and free its memory"}
        onClick=${remove}
      >
        ${removing ? "Unloading: requests finish …" : "Unload"}
      </button>`}
    </div>
  </li>`;
}

function Fact({ name, value }) {
  return value ? html`<div><dt>${name}</dt><dd>${value}</dd></div>` : null;
}

function Adapters({ names, removable, onOpen }) {
  return html`<ul class="models-adapters" aria-label="Adapters">
    ${names.map(
      (name) => html`<li key=${name}>
        <button
          type="button"
          class="models-chip"
          title=${`Chat with the adapter ${name}`}
          onClick=${() => onOpen(name)}
        >${name}</button>
        ${removable &&
        html`<button
          type="button"
          class="models-chip-remove"
          aria-label=${`Unload the adapter ${name}`}
          onClick=${() => change(() => api.unloadAdapter(name))}
        >×</button>`}
      </li>`,
    )}
  </ul>`;
}

function LoadAdapter({ served, adapters }) {
  const left = adapters.filter((name) => !served.adapters.includes(name));
  const [name, setName] = useState(null);
  const chosen = left.includes(name) ? name : left[0];
  if (!left.length) return null;
  return html`<div class="models-load-adapter">
    <${Choice} label="Adapter" value=${chosen} choices=${left} onChange=${setName} />
    <button type="button" onClick=${() => change(() => api.loadAdapter(served.model, chosen))}>Load</button>
  </div>`;
}
