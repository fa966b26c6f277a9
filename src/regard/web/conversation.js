// The conversation: in `chat` mode turns of user and model, in `continue` mode passages that the model carries on.

import * as api from "./api.js";
import { append, bits, element } from "./tokens.js";

const turns = document.getElementById("turns");
const welcome = document.getElementById("welcome");
const scroll = document.getElementById("scroll");
const composer = document.getElementById("composer");

export class Conversation {
  constructor() {
    this.messages = []; // chat
    this.text = ""; // continue: the last passage, prompt and all
    this.said = null; // its element
    turns.replaceChildren();
    welcome.hidden = false;
  }

  // What the attention panel looks at.
  passage(mode) {
    if (mode === "chat") return this.messages.length ? { messages: [...this.messages] } : null;
    return this.text ? { text: this.text } : null;
  }

  // Writes the user's part and streams the model's, until it is finished or stopped. A question that came to nothing is
  // taken back before the error is thrown.
  async go(mode, typed, model, sampling, signal) {
    const turn = mode === "chat" ? this.ask(typed) : this.begin(typed);
    const passage = this.passage(mode);
    const answer = { text: "", bits: 0, count: 0, finish: "stopped", from: performance.now() };
    turn.classList.add("writing");
    turn.ariaBusy = "true"; // read out when whole, not token by token
    try {
      const room = model.context - (await api.tokenize(passage, signal)).ids.length;
      const max_tokens = Math.max(1, Math.min(sampling.max_tokens, room));
      for await (const piece of api.generate(model.name, passage, { ...sampling, max_tokens }, signal)) {
        this.grow(turn, answer, piece);
      }
    } catch (error) {
      if (error.name === "AbortError") return;
      answer.finish = "failed";
      if (!answer.text) this.takeBack(mode, turn);
      throw error;
    } finally {
      turn.classList.remove("writing");
      turn.ariaBusy = "false";
      turn.querySelector(".foot").textContent = summary(answer);
      if (mode === "continue") this.text += answer.text;
      else if (turn.isConnected) this.messages.push({ role: "assistant", content: answer.text });
    }
  }

  takeBack(mode, turn) {
    if (mode === "chat") {
      this.messages.pop();
      turn.previousElementSibling.remove();
    } else if (turn.querySelector(".token")) return; // it was a passage carried on
    else [this.text, this.said] = ["", null];
    turn.remove();
  }

  ask(typed) {
    this.messages.push({ role: "user", content: typed });
    this.turn("user", "You").querySelector(".said").textContent = typed;
    return this.turn("model", "Model");
  }

  // An empty prompt carries the last passage on; any other text begins a new one.
  begin(typed) {
    if (!typed && this.said) return this.said;
    this.text = typed;
    this.said = this.turn("model", "Passage");
    this.said.querySelector(".said").append(element("span", "given", typed));
    return this.said;
  }

  turn(kind, who) {
    welcome.hidden = true;
    const turn = element("article", `turn ${kind}`);
    turn.append(element("span", "who", who), element("div", "said"));
    if (kind === "model") turn.append(element("p", "foot"));
    turns.append(turn);
    follow(true);
    return turn;
  }

  grow(turn, answer, { text, tokens, finish, usage }) {
    append(turn.querySelector(".said"), text, tokens);
    answer.text += text;
    answer.bits += tokens.reduce((sum, token) => sum + bits(token.logprob), 0);
    answer.count = usage?.completion_tokens ?? answer.count + tokens.length;
    answer.finish = finish ?? answer.finish;
    follow(false);
  }
}

function summary({ text, count, bits, finish, from }) {
  if (finish === "stop" && !text) return "the model ended its text at once"; // a special token alone
  if (!count) return "";
  const seconds = (performance.now() - from) / 1000;
  const why = { stop: "ended by itself", length: "cut at the limit", stopped: "stopped", failed: "failed" }[finish];
  const mean = (bits / count).toFixed(2);
  return `${count} tokens · ${(count / seconds).toFixed(0)} per second · ${mean} bits per token · ${why}`;
}

// Keeps the end in view, above the composer, unless the reader has scrolled back.
function follow(always) {
  const below = () => turns.getBoundingClientRect().bottom + 16 - composer.getBoundingClientRect().top;
  if (!always && below() > 160) return;
  scroll.scrollBy(0, Math.max(0, below())); // wide: the conversation scrolls
  window.scrollBy(0, Math.max(0, below())); // narrow: the page does
}
