// How the chat is shown, kept in the browser.

import { stored } from "../../state.js";

export const tint = stored("chat-tint", true); // tokens by surprisal
export const view = stored("chat-view", "tokens"); // or "markdown"
export const showsHistory = stored("chat-history", false);
export const showsAttention = stored("chat-attention", true);
