// The chat view: one column, or two that answer the same prompt with different models or settings, the history on the
// left, the attention of the last answer on the right.

import { Segments } from "../../controls.js";
import { classes, html, useEffect, useSignal } from "../../html.js";
import { model as pageModel } from "../../state.js";
import { AttentionPanel } from "../attention/panel.js";
import { Card, setBranch } from "./card.js";
import { Column } from "./column.js";
import { Composer } from "./composer.js";
import { conversation, open, openedBefore, save, touch } from "./conversations.js";
import { branch, draft, problems, restorePrompt, running, send, stop } from "./generation.js";
import { History, StorageNotice } from "./history.js";
import { hasRoom, showsAttention, showsHistory, showsPanel } from "./preferences.js";
import { switchTo } from "./switching.js";
import { isEmpty, newConversation, path } from "./tree.js";

setBranch((source, position, choice) => branch(source.index, source.node, position + (source.shift ?? 0), choice));

export default function View() {
  const model = useSignal(pageModel);
  if (!model) return html`<p class="notice">connecting …</p>`;
  if (!model.generates) return html`<${NoText} model=${model} />`;
  return html`<${Chat} key=${model.name} model=${model} />`;
}

function NoText({ model }) {
  return html`<div class="notice">
    <p><b>${model.name}</b> generates no text, so there is nothing to chat with.</p>
    <p>
      Look at it in <a href="#/inside">Inside</a>${model.attention && html` or <a href="#/attention">Attention</a>`}, or
      open another one in <a href="#/models">Models</a>.
    </p>
  </div>`;
}

function Chat({ model }) {
  const opened = useSignal(conversation);
  const history = useSignal(showsHistory);
  useSignal(running);
  useEffect(() => {
    problems.value = {}; // of the model before
    const fits = (kept) => kept && (kept.mode === "continue" || model.chat);
    const other = newConversation(model.chat ? "chat" : "continue");
    const before = isEmpty(conversation.value) ? openedBefore() : null;
    if (isEmpty(conversation.value)) open(fits(before) ? before : other);
    else if (!fits(conversation.value)) switchTo(other);
  }, []);
  const last = path(opened.columns[0]).at(-1);
  useEffect(() => {
    if (last?.role === "assistant") restorePrompt(last).catch(() => {}); // the answer is shown without its prompt
  }, [last?.id]);
  const start = (mode = opened.mode) => {
    switchTo(newConversation(mode));
    document.getElementById("prompt")?.focus();
  };
  const submit = async (text) => {
    draft.value = "";
    await send(
      text,
      opened.columns.map((column) => path(column).at(-1)?.id ?? ""),
    );
    document.getElementById("prompt")?.focus();
  };
  const pick = (text) => (draft.value = text) && submit(text);
  const canContinue = opened.mode === "continue" && !model.source && last !== undefined;
  return html`<div class=${classes("chat", history && "chat-with-history")}>
    ${history && html`<${History} opened=${opened.id} onClose=${() => (showsHistory.value = false)} />`}
    <section class="chat-conversation" aria-label="Conversation">
      <${Toolbar} opened=${opened} model=${model} onMode=${start} />
      <${StorageNotice} />
      <div class="chat-columns">
        ${opened.columns.map(
          (column, index) =>
            html`<${Column} key=${`${opened.id} ${index}`} ...${{ opened, column, index, model, onPick: pick }} />`,
        )}
      </div>
      <${Composer}
        conversation=${opened}
        model=${model}
        onSend=${submit}
        onNew=${() => start()}
        canContinue=${canContinue}
      />
    </section>
    <${Attention} model=${model} />
    <${Card} />
  </div>`;
}

function Toolbar({ opened, model, onMode }) {
  const compared = opened.columns.length > 1;
  const attention = useSignal(showsAttention);
  const room = useSignal(hasRoom);
  const compare = () => {
    stop();
    if (compared) opened.columns.length = 1;
    else opened.columns.push({ ...structuredClone(opened.columns[0]), model: model.name });
    touch();
    save(model.name);
  };
  return html`<div class="chat-toolbar">
    <button
      type="button"
      aria-pressed=${useSignal(showsHistory)}
      onClick=${() => (showsHistory.value = !showsHistory.value)}
    >
      History
    </button>
    <${Segments}
      label="Mode"
      value=${opened.mode}
      choices=${[
        ["chat", "Chat", !model.chat],
        ["continue", model.source ? "Source → output" : "Continue"],
      ]}
      onChange=${onMode}
    />
    <span class="spacer"></span>
    <button type="button" aria-pressed=${compared} title="Two models or settings side by side" onClick=${compare}>
      Compare
    </button>
    ${
      model.attention &&
      room &&
      html`<button type="button" aria-pressed=${attention} onClick=${() => (showsAttention.value = !attention)}>
        Attention
      </button>`
    }
  </div>`;
}

function Attention({ model }) {
  const shown = useSignal(showsPanel);
  if (!shown || !model.attention) return null;
  return html`<aside class="chat-attention" aria-label="Attention"><${AttentionPanel} /></aside>`;
}
