// How maps are shown; kept in the browser.

import { signal } from "../../html.js";
import { stored } from "../../state.js";

const DEFAULTS = { view: "map", hideFirst: false, scale: "map", linear: false, threshold: 0, order: "layers" };
export const settings = stored("attention", DEFAULTS);
export const set = (change) => (settings.value = { ...settings.value, ...change });

// Only these heads and tokens are shown; not kept.
export const kindFilter = signal(null); // a kind of the detectors
export const tokenFilter = signal("");

// One colour and letter for each kind that the detectors know, and the key that a query attends to.
export const KINDS = {
  "previous token": { letter: "P", colour: "--series-2", key: "the previous token" },
  "first token": { letter: "F", colour: "--series-4", key: "the first token" },
  "duplicate token": { letter: "D", colour: "--series-3", key: "the earlier occurrence of the same token" },
  induction: { letter: "I", colour: "--series-1", key: "the token after the earlier occurrence of the same token" },
};
