// Asks again and again while a view is open.

// Calls `ask` now, and again `wait()` milliseconds after each answer, or after a change of `signal`, whose value `wait`
// reads. There is one request at a time, and none while the page is hidden. The returned function ends it.
export function poll(ask, signal, wait) {
  let timer = 0;
  let asking = false;
  let ended = false;
  const plan = () => {
    clearTimeout(timer);
    if (!ended && !document.hidden) timer = setTimeout(tick, wait());
  };
  const tick = async () => {
    if (asking || ended || document.hidden) return;
    clearTimeout(timer);
    asking = true;
    try {
      await ask();
    } finally {
      asking = false;
      plan();
    }
  };
  tick();
  const unsubscribe = signal.subscribe(() => asking || plan());
  document.addEventListener("visibilitychange", tick);
  return () => {
    ended = true;
    clearTimeout(timer);
    unsubscribe();
    document.removeEventListener("visibilitychange", tick);
  };
}
