// The width of an element in pixels, so that drawings keep the size of their text.

import { useEffect, useRef, useState } from "../html.js";

export function useWidth(initial = 400) {
  const frame = useRef();
  const [width, setWidth] = useState(initial);
  useEffect(() => {
    const element = frame.current; // the reference is null when the view is left, the observer still reports once
    const resized = new ResizeObserver(() => setWidth(Math.max(200, element.clientWidth)));
    resized.observe(element);
    return () => resized.disconnect();
  }, []);
  return [frame, width];
}
