// The view library in one place: Preact with templates instead of JSX, and signals for state that views share.
// Preact sets text as text nodes, so nothing in a template can become markup.

import { createElement } from "./vendor/preact.js";
import { useEffect, useState } from "./vendor/preact-hooks.js";
import htm from "./vendor/htm.js";

export { render } from "./vendor/preact.js";
export { useEffect, useId, useLayoutEffect, useMemo, useRef, useState } from "./vendor/preact-hooks.js";
export { computed, effect, signal } from "./vendor/signals.js";

export const html = htm.bind(createElement);

// The value of a signal; the component is rendered again when it changes.
export function useSignal(signal) {
  const [, setRendered] = useState(() => signal.value);
  useEffect(() => signal.subscribe((value) => setRendered(() => value)), [signal]); // not again for the same value
  return signal.value;
}

export const classes = (...names) => names.filter(Boolean).join(" ");
