// The conversation: messages of user and model in `chat` mode, passages that the model continues in `continue` mode.

import * as api from "./api.js";
import { appendText, bits, element } from "./tokens.js";

const turns = document.getElementById("turns");
const welcome = document.getElementById("welcome");
const scroll = document.getElementById("scroll");
const composer = document.getElementById("composer");

export class Conversation {
  constructor() {
    this.messages = []; // chat
    this.text = ""; // continue: the last passage with its prompt
    this.passageTurn = null; // the element of that passage
    turns.replaceChildren();
    welcome.hidden = false;
  }

  // The passage that is sent to the server; null if there is none yet.
  passage(mode) {
    if (mode === "chat") return this.messages.length ? { messages: [...this.messages] } : null;
    return this.text ? { text: this.text } : null;
  }

  // Adds the user's prompt and streams the model's answer. If there is no answer, removes the prompt and throws.
  async generate(mode, prompt, model, sampling, signal) {
    const turn = mode === "chat" ? this.addMessage(prompt) : this.addPassage(prompt);
    const passage = this.passage(mode);
    const answer = { text: "", bits: 0, count: 0, finish: "stopped", start: performance.now() };
    turn.classList.add("streaming");
    turn.ariaBusy = "true"; // screen readers read the finished answer, not every token
    try {
      const available = model.context - (await api.tokenize(model.name, passage, signal)).ids.length;
      const max_tokens = Math.max(1, Math.min(sampling.max_tokens, available));
      for await (const delta of api.generate(model.name, passage, { ...sampling, max_tokens }, signal)) {
        this.addDelta(turn, answer, delta);
      }
    } catch (error) {
      if (error.name === "AbortError") return;
      answer.finish = "failed";
      if (!answer.text) this.removePrompt(mode, turn);
      throw error;
    } finally {
      turn.classList.remove("streaming");
      turn.ariaBusy = "false";
      turn.querySelector(".stats").textContent = summary(answer);
      if (mode === "continue") this.text += answer.text;
      else if (turn.isConnected) this.messages.push({ role: "assistant", content: answer.text });
    }
  }

  removePrompt(mode, turn) {
    if (mode === "chat") {
      this.messages.pop();
      turn.previousElementSibling.remove();
    } else if (turn.querySelector(".token")) return; // the passage has earlier text of the model
    else [this.text, this.passageTurn] = ["", null];
    turn.remove();
  }

  addMessage(prompt) {
    this.messages.push({ role: "user", content: prompt });
    this.addTurn("user", "You").querySelector(".content").textContent = prompt;
    return this.addTurn("model", "Model");
  }

  // An empty prompt continues the last passage; any other text starts a new one.
  addPassage(prompt) {
    if (!prompt && this.passageTurn) return this.passageTurn;
    this.text = prompt;
    this.passageTurn = this.addTurn("model", "Passage");
    this.passageTurn.querySelector(".content").append(element("span", "prompt-text", prompt));
    return this.passageTurn;
  }

  addTurn(kind, author) {
    welcome.hidden = true;
    const turn = element("article", `turn ${kind}`);
    turn.append(element("span", "author", author), element("div", "content"));
    if (kind === "model") turn.append(element("p", "stats"));
    turns.append(turn);
    scrollToEnd(true);
    return turn;
  }

  addDelta(turn, answer, { text, tokens, finish, usage }) {
    appendText(turn.querySelector(".content"), text, tokens);
    answer.text += text;
    answer.bits += tokens.reduce((sum, token) => sum + bits(token.logprob), 0);
    answer.count = usage?.completion_tokens ?? answer.count + tokens.length;
    answer.finish = finish ?? answer.finish;
    scrollToEnd(false);
  }
}

function summary({ text, count, bits, finish, start }) {
  if (finish === "stop" && !text) return "the model ended without any text"; // only a stop token
  if (!count) return "";
  const seconds = (performance.now() - start) / 1000;
  const reason = { stop: "ended", length: "token limit reached", stopped: "stopped", failed: "failed" }[finish];
  const mean = (bits / count).toFixed(2);
  return `${count} tokens · ${(count / seconds).toFixed(0)} per second · ${mean} bits per token · ${reason}`;
}

// Keeps the end visible above the composer, unless the user has scrolled back.
function scrollToEnd(always) {
  const below = () => turns.getBoundingClientRect().bottom + 16 - composer.getBoundingClientRect().top;
  if (!always && below() > 160) return;
  scroll.scrollBy(0, Math.max(0, below())); // wide: the conversation scrolls
  window.scrollBy(0, Math.max(0, below())); // narrow: the page scrolls
}
