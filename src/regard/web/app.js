// The page's wiring: controls, the key dialog, and what happens when text is sent.

import * as api from "./api.js";
import { AttentionPanel } from "./attention.js";
import { Conversation } from "./conversation.js";
import { element, watch } from "./tokens.js";

const get = (id) => document.getElementById(id);
const prompt = get("prompt");
let conversation = new Conversation();
let model = null;
let panel = null;
let running = null;

const mode = () => (get("mode-chat").checked ? "chat" : "continue");

async function start() {
  try {
    model = await api.describeModel();
  } catch (error) {
    if (error.status === 401) return askForKey();
    return notify(error.message);
  }
  const facts = [`${model.layers} layers`, `${model.context} tokens of context`, `vocabulary ${model.vocabulary}`];
  get("facts").replaceChildren(element("b", "", model.name), ` · ${(model.layers ? facts : facts.slice(1)).join(" · ")}`);
  document.title = `${model.name} · regard`;
  get("mode-chat").disabled = !model.chat;
  get(model.chat ? "mode-chat" : "mode-continue").checked = true;
  get("look").hidden = !model.attention;
  if (model.attention) panel = new AttentionPanel(model);
  changeMode();
}

function askForKey() {
  const dialog = get("key-dialog");
  dialog.addEventListener("close", () => (api.useKey(get("key").value), start()), { once: true });
  dialog.showModal();
}

function notify(message) {
  get("notice").textContent = message;
  get("notice").hidden = !message;
}

function changeMode() {
  running?.abort();
  conversation = new Conversation();
  panel?.clear();
  notify("");
  const chat = mode() === "chat";
  prompt.placeholder = chat ? "Ask the model …" : "Begin a text, or press Continue to carry the last one on …";
  get("send").textContent = chat ? "Send" : "Continue";
  prompt.focus();
}

function sampling() {
  const chosen = {
    temperature: get("temperature").valueAsNumber,
    top_p: get("top-p").valueAsNumber,
    max_tokens: get("max-tokens").valueAsNumber || 96,
  };
  const seed = get("seed").valueAsNumber;
  return Number.isNaN(seed) ? chosen : { ...chosen, seed };
}

async function send() {
  const typed = prompt.value;
  if (running || !model || (!typed.trim() && !(mode() === "continue" && conversation.passage("continue")))) return;
  notify("");
  prompt.value = "";
  get("settings").open = false;
  running = new AbortController();
  const { signal } = running;
  busy(true);
  try {
    await conversation.go(mode(), typed, model, sampling(), signal);
  } catch (error) {
    if (!(error instanceof api.ApiError)) throw error;
    notify(error.message);
    prompt.value = typed;
  } finally {
    running = null;
    busy(false);
    prompt.focus();
  }
  await panel?.look(conversation.passage(mode()));
}

function busy(yes) {
  get("stop").hidden = !yes;
  get("send").hidden = yes;
}

function showSettings() {
  const { temperature, top_p } = sampling();
  get("temperature-value").textContent = temperature.toFixed(2);
  get("top-p-value").textContent = top_p.toFixed(2);
  get("settings-summary").textContent = `T ${temperature.toFixed(2)}`;
}

get("composer").addEventListener("submit", (event) => (event.preventDefault(), send()));
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
get("stop").addEventListener("click", () => running?.abort());
get("clear").addEventListener("click", changeMode);
get("settings").addEventListener("input", showSettings);
addEventListener("pointerdown", (event) => {
  if (!event.target.closest("#settings")) get("settings").open = false;
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape") get("settings").open = false;
});
for (const choice of document.getElementsByName("mode")) choice.addEventListener("change", changeMode);
const tint = () => get("turns").classList.toggle("tinted", get("tint").checked);
get("tint").addEventListener("change", tint);
tint();
showSettings();
watch(get("scroll"));
start();
