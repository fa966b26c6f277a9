// Labels of the rows at the left of a map, and of its columns, turned, above it.

import { css } from "./colours.js";
import { clip } from "./scroll_canvas.js";

// labels: [[text, middle in pixels], …]; left, top: of the cells; marked labels cover those below them.
export function drawRowLabels(context, labels, left, top, marked) {
  for (const [text, middle] of labels) {
    if (middle >= top - 2) drawLabel(context, clip(context, text, left - 10), left - 6, middle, "right", marked);
  }
}

export function drawColumnLabels(context, labels, left, top, marked) {
  for (const [text, middle] of labels) {
    if (middle < left - 2) continue;
    context.save();
    context.translate(middle, top - 6);
    context.rotate(-Math.PI / 2);
    drawLabel(context, clip(context, text, top - 10), 0, 0, "left", marked);
    context.restore();
  }
}

function drawLabel(context, text, x, y, align, marked) {
  context.textAlign = align;
  context.textBaseline = "middle";
  if (marked) {
    const width = context.measureText(text).width + 6;
    context.fillStyle = css("--surface");
    context.fillRect(align === "left" ? x - 3 : x - width + 3, y - 7, width, 14);
  }
  context.fillStyle = css(marked ? "--text" : "--muted");
  context.fillText(text, x, y);
}
