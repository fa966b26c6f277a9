// The width of an element in pixels, so that drawings keep the size of their text.

import { useEffect, useRef, useState } from "../../html.js";

export function useWidth(initial = 400) {
  const frame = useRef();
  const [width, setWidth] = useState(initial);
  useEffect(() => {
    const resized = new ResizeObserver(([entry]) => setWidth(Math.max(200, Math.round(entry.contentRect.width))));
    resized.observe(frame.current);
    return () => resized.disconnect();
  }, []);
  return [frame, width];
}
