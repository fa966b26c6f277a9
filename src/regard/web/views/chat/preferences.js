// How the chat is shown, kept in the browser.

import { computed, signal } from "../../html.js";
import { stored } from "../../state.js";

export const tint = stored("chat-tint", true); // tokens by surprisal
export const view = stored("chat-view", "tokens"); // or "markdown"
export const showsHistory = stored("chat-history", false);
export const showsAttention = stored("chat-attention", true);

// On a phone there is no room for the panel, so that nothing is loaded for it; the view Attention has the same.
const phone = matchMedia("(max-width: 760px)");
export const hasRoom = signal(!phone.matches);
phone.addEventListener("change", () => (hasRoom.value = !phone.matches));
export const showsPanel = computed(() => showsAttention.value && hasRoom.value);
