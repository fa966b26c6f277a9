// Events of the server as state: {events, running, problem, stop}. A new body stops the stream of the last one; stop()
// keeps the events that have arrived.

import { useEffect, useRef, useState } from "../../html.js";

const DELAY = 120; // milliseconds, in which a slider may move on
const NOTHING = { events: [], running: false, problem: "" };

// open(body, signal): the events; body: null for none. The stream starts again if `key` changes.
export function useEvents(open, body, key) {
  const [state, setState] = useState(NOTHING);
  const stream = useRef(null);
  useEffect(() => {
    if (!body) return setState(NOTHING);
    const stop = (stream.current = new AbortController());
    const events = [];
    setState({ events, running: true, problem: "" });
    const read = async () => {
      try {
        for await (const event of open(body, stop.signal)) {
          events.push(event);
          if (!stop.signal.aborted) setState({ events, running: true, problem: "", count: events.length });
        }
        if (!stop.signal.aborted) setState({ events, running: false, problem: "", count: events.length });
      } catch (error) {
        if (!stop.signal.aborted) setState({ events, running: false, problem: error.message, count: events.length });
      }
    };
    const timer = setTimeout(read, DELAY);
    return () => (clearTimeout(timer), stop.abort());
  }, [key]);
  const stop = () => {
    stream.current?.abort();
    setState((now) => ({ ...now, running: false }));
  };
  return { ...state, stop };
}
