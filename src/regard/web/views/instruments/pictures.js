// Small gray images, each with a label.

import { classes, html, useEffect, useRef } from "../../html.js";

export function Pictures({ panel }) {
  return html`<ul class=${classes("instrument-images", panel.images.length > 3 && "many")}>
    ${panel.images.map(
      ({ label, values }, i) =>
        html`<li key=${i}>
          <${Picture} values=${values} name=${`${panel.title}: ${label || i + 1}`} />
          ${label && html`<span>${label}</span>`}
        </li>`,
    )}
  </ul>`;
}

function Picture({ values, name }) {
  const canvas = useRef();
  useEffect(() => {
    const image = new ImageData(values[0].length, values.length);
    values.flat().forEach((value, i) => image.data.set([...Array(3).fill(255 * value), 255], 4 * i));
    Object.assign(canvas.current, { width: image.width, height: image.height });
    canvas.current.getContext("2d").putImageData(image, 0, 0);
  }, [values]);
  return html`<canvas ref=${canvas} role="img" aria-label=${name}></canvas>`;
}
