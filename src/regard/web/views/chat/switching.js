// Opens another conversation. What is generated for the one before is stopped; its answer stays with it.

import { passage, select } from "../../state.js";
import { closeCard } from "./card.js";
import { conversation, forget, open } from "./conversations.js";
import { stopAndReset } from "./generation.js";
import { newConversation } from "./tree.js";

export function switchTo(other) {
  stopAndReset();
  closeCard();
  passage.value = null;
  select({ row: null, column: null, pinned: false });
  open(other);
}

// Deletes conversations; in place of the opened one there is an empty one.
export function discard(ids) {
  forget(ids);
  if (ids.includes(conversation.value.id)) switchTo(newConversation(conversation.value.mode));
}
