// Connects the controls of the page: prompt, settings, key dialog, conversation and attention panel.

import * as api from "./api.js";
import { AttentionPanel } from "./attention.js";
import { Conversation } from "./conversation.js";
import { element, watchTokens } from "./tokens.js";

const get = (id) => document.getElementById(id);
const prompt = get("prompt");
let conversation = new Conversation();
let model = null;
let panel = null;
let running = null; // AbortController of the generation

const mode = () => (get("mode-chat").checked ? "chat" : "continue");

async function start() {
  try {
    model = await api.describeModel(new URLSearchParams(location.search).get("model"));
  } catch (error) {
    if (error.status === 401) return askForKey();
    return notify(error.message);
  }
  const facts = [`${model.layers} layers`, `context ${model.context} tokens`, `vocabulary ${model.vocabulary}`];
  const title = element("b", "", model.models.length > 1 ? "" : model.name);
  if (model.models.length > 1) title.append(modelPicker());
  get("facts").replaceChildren(title, ` · ${(model.layers ? facts : facts.slice(1)).join(" · ")}`);
  document.title = `${model.name} · regard`;
  get("mode-chat").disabled = !model.chat;
  get(model.chat ? "mode-chat" : "mode-continue").checked = true;
  get("attention").hidden = !model.attention;
  if (model.attention) panel = new AttentionPanel(model);
  reset();
}

// Another model opens the page again, with its name in the address.
function modelPicker() {
  const picker = element("select", "");
  picker.id = "model";
  picker.setAttribute("aria-label", "Model");
  picker.append(...model.models.map((name) => new Option(name, name, false, name === model.name)));
  picker.addEventListener("change", () => (location.search = `?model=${encodeURIComponent(picker.value)}`));
  return picker;
}

function askForKey() {
  const dialog = get("key-dialog");
  dialog.addEventListener("close", () => (api.setKey(get("key").value), start()), { once: true });
  dialog.showModal();
}

function notify(message) {
  get("notice").textContent = message;
  get("notice").hidden = !message;
}

// Starts an empty conversation in the selected mode.
function reset() {
  running?.abort();
  conversation = new Conversation();
  panel?.clear();
  notify("");
  const chat = mode() === "chat";
  prompt.placeholder = chat ? "Write a message …" : "Write a prompt; leave it empty to continue the last passage …";
  get("send").textContent = chat ? "Send" : "Continue";
  prompt.focus();
}

function sampling() {
  const settings = {
    temperature: get("temperature").valueAsNumber,
    top_p: get("top-p").valueAsNumber,
    max_tokens: get("max-tokens").valueAsNumber || 96,
  };
  const seed = get("seed").valueAsNumber;
  return Number.isNaN(seed) ? settings : { ...settings, seed };
}

async function send() {
  const text = prompt.value;
  if (running || !model || (!text.trim() && !(mode() === "continue" && conversation.passage("continue")))) return;
  notify("");
  prompt.value = "";
  get("settings").open = false;
  running = new AbortController();
  const { signal } = running;
  showBusy(true);
  try {
    await conversation.generate(mode(), text, model, sampling(), signal);
  } catch (error) {
    if (!(error instanceof api.ApiError)) throw error;
    notify(error.message);
    prompt.value = text;
  } finally {
    running = null;
    showBusy(false);
    prompt.focus();
  }
  await panel?.show(conversation.passage(mode()));
}

function showBusy(busy) {
  get("stop").hidden = !busy;
  get("send").hidden = busy;
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
get("clear").addEventListener("click", reset);
get("settings").addEventListener("input", showSettings);
addEventListener("pointerdown", (event) => {
  if (!event.target.closest("#settings")) get("settings").open = false;
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape") get("settings").open = false;
});
for (const choice of document.getElementsByName("mode")) choice.addEventListener("change", reset);
const updateTint = () => get("turns").classList.toggle("tinted", get("tint").checked);
get("tint").addEventListener("change", updateTint);
updateTint();
showSettings();
watchTokens(get("scroll"));
start();
