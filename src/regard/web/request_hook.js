// Requests that follow controls: sent once the controls rest, and aborted when they change again.

import { useEffect } from "./html.js";

// Calls `load(signal)` this many milliseconds after the last change of the inputs.
export function useDelayed(delay, load, inputs) {
  useEffect(() => {
    const control = new AbortController();
    const timer = setTimeout(() => load(control.signal), delay);
    return () => {
      clearTimeout(timer);
      control.abort();
    };
  }, inputs);
}
