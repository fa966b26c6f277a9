// One column: its messages, and in a comparison its model and settings.

import { Choice } from "../../controls.js";
import { classes, effect, html, useEffect, useRef, useSignal, useState } from "../../html.js";
import { selection } from "../../state.js";
import { rowWeights } from "../attention/weights.js";
import { followScroll } from "./card.js";
import { touch } from "./conversations.js";
import { Welcome } from "./examples.js";
import { describe, problems, running } from "./generation.js";
import { Messages } from "./messages.js";
import { showsPanel, tint, view } from "./preferences.js";
import { Sampling } from "./sampling.js";
import { handlers, mark } from "./tokens.js";
import { path } from "./tree.js";

export function Column({ opened, column, index, model, onPick }) {
  const own = useDescription(column, model);
  const problem = useSignal(problems)[index];
  const scroll = useRef();
  useStickToEnd(scroll, opened, index);
  useMarks(scroll, index);
  const empty = !Object.keys(column.nodes).length;
  return html`<div class="chat-column" data-linked=${index === 0 || null}>
    ${opened.columns.length > 1 && html`<${ColumnHeader} ...${{ opened, column, index, model, own }} />`}
    <div
      class=${classes("chat-scroll", useSignal(tint) && "chat-tinted")}
      ref=${scroll}
      tabindex="0"
      role="log"
      aria-label=${opened.columns.length > 1 ? `Conversation with ${own?.name ?? column.model}` : "Conversation so far"}
      ...${handlers}
      onScroll=${followScroll}
    >
      ${empty && (index === 0 ? html`<${Welcome} mode=${opened.mode} model=${model} onPick=${onPick} />` : null)}
      <${Messages} mode=${opened.mode} column=${column} index=${index} view=${useSignal(view)} model=${own} />
    </div>
    ${problem && html`<p class="problem chat-notice" role="alert">${problem}</p>`}
  </div>`;
}

function ColumnHeader({ opened, column, index, model, own }) {
  const set = (name) => {
    column.model = name;
    touch();
  };
  return html`<header class="chat-column-header">
    ${
      index === 0 || model.models.length === 1
        ? html`<b>${own?.name}</b>`
        : html`<${Choice} label="Model" value=${column.model} choices=${model.models} onChange=${set} />`
    }
    <span class="spacer"></span>
    ${own && html`<${Sampling} model=${own} column=${column} index=${index} chat=${opened.mode === "chat"} />`}
  </header>`;
}

// The description of a column's model, or null until it is known.
function useDescription(column, model) {
  const [own, setOwn] = useState(null);
  useEffect(() => {
    let current = true;
    Promise.resolve(describe(column)).then(
      (found) => current && setOwn(found),
      () => {},
    );
    return () => (current = false);
  }, [column.model, model.name]);
  return !column.model || column.model === model.name ? model : own;
}

// Keeps the end visible while tokens arrive, unless the user has scrolled back.
function useStickToEnd(scroll, opened, index) {
  const stuck = useRef(true);
  useEffect(() => {
    const element = scroll.current;
    const watch = () => (stuck.current = element.scrollHeight - element.scrollTop - element.clientHeight < 120);
    element.addEventListener("scroll", watch);
    return () => element.removeEventListener("scroll", watch);
  }, []);
  const count = path(opened.columns[index]).length;
  useEffect(() => {
    stuck.current = true;
  }, [count]);
  useEffect(() => {
    if (running.value.has(index) && stuck.current) scroll.current.scrollTop = scroll.current.scrollHeight;
  }, [opened]);
}

// Marks the selected row of the attention map, and tints tokens by its weights while the panel is open.
// An effect, not a render: pointing at tokens must not render the messages again. Only the first column has the
// passage.
function useMarks(scroll, index) {
  const follow = () => {
    const shown = showsPanel.value;
    const [place, weights] = shown ? [selection.value, rowWeights.value] : [{ row: null, column: null }, null];
    if (scroll.current) mark(scroll.current, place, weights); // else the column is not rendered, or no more
  };
  useEffect(() => (index === 0 ? effect(follow) : undefined), []);
}
