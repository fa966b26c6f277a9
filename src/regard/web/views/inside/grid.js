// A table of layers × positions on a canvas. Pointing moves a frame and calls `onPoint`; nothing is drawn again.
// The canvas is one tab stop: arrow keys move the point, Enter picks a cell.

import { html, useLayoutEffect, useMemo, useRef, useSignal } from "../../html.js";
import { css } from "../../draw/colours.js";
import { clip } from "../../draw/scroll_canvas.js";
import { theme as themes } from "../../draw/theme.js";
import { visible } from "../../token_text.js";

// rows, columns: labels; colour(row, column): [red, green, blue] or null for a cell that is not computed yet;
// text(row, column): the text in a cell, or undefined; cell: [width, height]; version: changes with the values;
// fromEnd: the last columns are shown first.
export function Grid({
  label,
  rows,
  columns,
  colour,
  text,
  cell: [width, height],
  version,
  point,
  onPoint,
  onPick,
  fromEnd,
}) {
  const canvas = useRef();
  const theme = useSignal(themes);
  const [across, down] = [columns.length * width, rows.length * height];
  useLayoutEffect(
    () => paint(canvas.current, rows.length, columns.length, width, height, colour, text),
    [version, theme, across, down],
  );
  useLayoutEffect(() => {
    const frame = canvas.current.closest(".inside-scroll");
    if (fromEnd) frame.scrollLeft = frame.scrollWidth;
  }, [columns]);
  const heads = useMemo(
    () =>
      columns.map(
        (token, i) =>
          html`<span key=${i} style=${{ width: `${width}px` }} title=${`${i}: ${token}`}>${visible(token)}</span>`,
      ),
    [columns, width],
  );
  const sides = useMemo(
    () =>
      rows.map(
        (name) => html`<span key=${name} style=${{ height: `${height}px`, lineHeight: `${height}px` }}>${name}</span>`,
      ),
    [rows, height],
  );
  const locate = (event) => {
    const box = canvas.current.getBoundingClientRect();
    const [row, column] = [
      Math.floor((event.clientY - box.top) / height),
      Math.floor((event.clientX - box.left) / width),
    ];
    return rows[row] !== undefined && columns[column] !== undefined ? { row, column } : null;
  };
  const follow = (event) => {
    const found = locate(event);
    if (found && (found.row !== point?.row || found.column !== point?.column)) onPoint(found);
  };
  const press = (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if ((event.key === "Enter" || event.key === " ") && point && onPick) return (event.preventDefault(), onPick(point));
    if (!step) return;
    event.preventDefault();
    const { row, column } = point ?? { row: 0, column: 0 };
    const next = { row: clamp(row + step[0], rows.length), column: clamp(column + step[1], columns.length) };
    onPoint(next);
    canvas.current.parentElement
      .querySelector(".inside-cursor")
      ?.scrollIntoView({ block: "nearest", inline: "nearest" });
  };
  return html`<div class=${width < 60 ? "inside-grid narrow" : "inside-grid"}>
    <div class="inside-grid-corner"></div>
    <div class="inside-grid-columns" style=${{ width: `${across}px` }} aria-hidden="true">${heads}</div>
    <div class="inside-grid-rows" aria-hidden="true">${sides}</div>
    <div class="inside-grid-cells" style=${{ width: `${across}px`, height: `${down}px` }}>
      <canvas
        ref=${canvas}
        role="img"
        tabindex="0"
        aria-label=${label}
        onPointerMove=${follow}
        onPointerDown=${follow}
        onClick=${(event) => onPick && locate(event) && onPick(locate(event))}
        onKeyDown=${press}
      ></canvas>
      ${
        point &&
        html`<i
        class="inside-cursor"
        style=${{
          left: `${point.column * width}px`,
          top: `${point.row * height}px`,
          width: `${width}px`,
          height: `${height}px`,
        }}
      ></i>`
      }
    </div>
  </div>`;
}

// Few layers have tall cells.
export const cellHeight = (rows) => Math.max(22, Math.min(40, Math.floor(240 / rows)));

const clamp = (value, count) => Math.min(Math.max(value, 0), count - 1);

function paint(canvas, rows, columns, width, height, colour, text) {
  const scale = devicePixelRatio || 1;
  [canvas.width, canvas.height] = [Math.round(columns * width * scale), Math.round(rows * height * scale)];
  [canvas.style.width, canvas.style.height] = [`${columns * width}px`, `${rows * height}px`];
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.font = `12px ${getComputedStyle(canvas).fontFamily}`;
  context.textBaseline = "middle";
  const gap = width > 12 ? 1 : 0;
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) {
      const filled = colour(row, column);
      context.fillStyle = filled ? `rgb(${filled.join(" ")})` : css("--subtle");
      context.fillRect(column * width, row * height, width - gap, height - gap);
      const written = filled && text?.(row, column);
      if (!written) continue;
      context.fillStyle = isDark(filled) ? "#fff" : "#111";
      context.fillText(clip(context, visible(written), width - 8), column * width + 4, row * height + height / 2);
    }
  }
}

const isDark = ([red, green, blue]) => 0.299 * red + 0.587 * green + 0.114 * blue < 140;
