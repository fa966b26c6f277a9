// What an empty conversation shows: what the page is for, and prompts to try.

import { tokenize } from "../../api.js";
import { html, useEffect, useState } from "../../html.js";

// Stories as in the embedded data set, which the demo model knows; its vocabulary has little else.
const STORY = "Emma is in the park. Iris was in the school. The hat lies in the forest. Emma walked to the school.";
const WORLD = {
  chat: [
    `${STORY} Where is Emma?`,
    "Jack is in the park. The brush is in the park. Rosa was in the park. Jack picked up the brush. Who has the brush?",
    "Beth was in the office. Peter starts in the museum. There is a ball in the forest. Where is the ball?",
  ],
  continue: [STORY, "Emma is in the park. Leo was in the park. The hat lies in the", "Anna is in the studio. Anna"],
};
const GENERAL = {
  chat: [
    "Why is the sky blue? Answer in two sentences.",
    "Write a Python function that reverses a list, with an example.",
    "List three uses of attention heads in a transformer as a Markdown table.",
  ],
  continue: [
    "The capital of France is",
    "When Mary and John went to the store, John gave a drink to",
    "def fibonacci(n):\n",
  ],
};
const SOURCES = [
  "Anna is in the kitchen.",
  "translate English to German: The house is wonderful.",
  "summarize: The tower is 324 metres tall, about the same height as an 81-storey building.",
];

export function Welcome({ mode, model, onPick }) {
  const world = useKnowsTheWorld(model);
  const examples = model.source ? SOURCES : (world ? WORLD : GENERAL)[mode];
  return html`<div class="chat-welcome" id="welcome">
    <h2>Look inside your model.</h2>
    <p class="muted">
      ${
        mode === "chat"
          ? "Ask something. Point at a token to see its alternatives, click it to continue from another one."
          : model.source
            ? "Write a source text; the model writes its output."
            : "Write the beginning of a text; the model continues it token by token."
      }${" "}
      Tokens are tinted by their surprisal, −log₂ of their probability: the stronger, the less likely.
    </p>
    <ul class="chat-examples" aria-label="Examples">
      ${examples.map(
        (text) => html`<li key=${text}><button type="button" onClick=${() => onPick(text)}>${text}</button></li>`,
      )}
    </ul>
  </div>`;
}

// Whether the model was trained on the embedded data: a small vocabulary with a token for every word of a story.
function useKnowsTheWorld(model) {
  const [known, setKnown] = useState(false);
  useEffect(() => {
    if (model.vocabulary > 5000) return setKnown(false);
    const words = STORY.match(/\w+|\./g).length;
    tokenize(model.name, { text: STORY }).then(
      ({ ids }) => setKnown(ids.length <= words + 2),
      () => setKnown(false),
    );
  }, [model.name]);
  return known;
}
