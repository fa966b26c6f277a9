// A matrix as coloured cells on a canvas, with labels of rows and columns and, where there is room, numbers. It is one
// tab stop: the arrow keys move between the cells, Enter chooses a row.

import { html, useEffect, useRef, useSignal, useState } from "../../html.js";
import { css, diverging, heat } from "../../draw/colours.js";
import { clip } from "../../draw/scroll_canvas.js";
import { theme } from "../../draw/theme.js";
import { format, short } from "../../draw/numbers.js";

const FONT = "ui-sans-serif, system-ui, sans-serif";
const [MIN_CELL, MAX_CELL] = [5, 46];
const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }; // down, across

export function Heatmap({ panel, onPick }) {
  const frame = useRef();
  const canvas = useRef();
  const [cell, setCell] = useState(null); // the cell under the pointer, or that of the arrow keys
  const colours = useSignal(theme);
  const place = useRef(null);
  useEffect(() => {
    const draw = () => {
      // the observer may still fire when the panel is gone
      if (frame.current) place.current = paint(canvas.current, frame.current.clientWidth, panel);
    };
    draw();
    const resized = new ResizeObserver(draw);
    resized.observe(frame.current);
    return () => resized.disconnect();
  }, [panel, colours]);
  const find = (event) => {
    const { left, top, size, height } = place.current;
    const box = canvas.current.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top - top) / height);
    const column = Math.floor((event.clientX - box.left - left) / size);
    const inside = row >= 0 && row < panel.rows.length && column < panel.columns.length;
    return inside && column >= 0 ? { row, column } : inside && column < 0 ? { row, column: null } : null;
  };
  const pick = (event) => {
    const found = find(event);
    if (found) onPick(found.row);
  };
  const move = (event) => {
    const [down, across] = ARROWS[event.key] ?? [];
    const picks = panel.sets && cell && (event.key === "Enter" || event.key === " ");
    if (down === undefined && !picks) return;
    event.preventDefault();
    if (picks) return onPick(cell.row);
    const within = (index, labels) => Math.min(Math.max(index, 0), labels.length - 1);
    const { row, column } = cell ?? { row: -down, column: -across }; // the first key goes to the first cell
    setCell({ row: within(row + down, panel.rows), column: within((column ?? 0) + across, panel.columns) });
  };
  const known = cell && cell.column !== null && cell.row < panel.rows.length && cell.column < panel.columns.length;
  const value = known && panel.values[cell.row][cell.column];
  const text = known
    ? `${panel.rows[cell.row]} → ${panel.columns[cell.column]}: ${value === null ? "blocked" : format(value)}`
    : panel.sets
      ? "Click a row to choose it."
      : "";
  const summary = `${panel.title}: ${panel.rows.length} rows, ${panel.columns.length} columns`;
  return html`<div class="instrument-heatmap-frame" ref=${frame}>
    <canvas
      ref=${canvas}
      role="img"
      tabindex="0"
      aria-label=${`${summary}. Arrow keys move between the cells.`}
      class=${panel.sets ? "pickable" : ""}
      onPointerMove=${(event) => setCell(find(event))}
      onPointerDown=${(event) => setCell(find(event))}
      onPointerLeave=${(event) => event.pointerType !== "touch" && setCell(null)}
      onClick=${pick}
      onKeyDown=${move}
      onBlur=${() => setCell(null)}
    ></canvas>
    ${known && place.current && html`<i class="instrument-cursor" style=${box(place.current, cell)}></i>`}
    <div class="instrument-caption">
      <p class="instrument-readout muted number" aria-live="polite">${text}</p>
      <${Scale} panel=${panel} />
    </div>
  </div>`;
}

// What the colours mean: the smallest value, a bar, the largest value.
function Scale({ panel }) {
  const largest = largestOf(panel);
  const [low, high] = { unit: [0, 1], signed: [-largest, largest], positive: [0, largest] }[panel.scale];
  const colour = colours(panel);
  const stops = [0, 0.25, 0.5, 0.75, 1].map((at) => `rgb(${colour(low + at * (high - low)).join(" ")})`);
  return html`<p class="instrument-scale muted number">
    ${format(low, 2)}<span style=${{ background: `linear-gradient(to right, ${stops.join(", ")})` }}></span
    >${format(high, 2)}
  </p>`;
}

const box = ({ left, top, size, height }, { row, column }) => ({
  left: `${left + column * size}px`,
  top: `${top + row * height}px`,
  width: `${size}px`,
  height: `${height}px`,
});

// Draws the map into the width and returns where its cells are.
function paint(canvas, width, panel) {
  const { rows, columns, values, selected } = panel;
  const context = canvas.getContext("2d");
  const ratio = devicePixelRatio || 1;
  context.font = `600 12px ${FONT}`;
  const measure = (text) => context.measureText(text).width;
  const left = Math.min(120, Math.max(...rows.map(measure)) + 12);
  const size = Math.max(MIN_CELL, Math.min(MAX_CELL, (width - left - 2) / columns.length));
  const turned = Math.max(...columns.map(measure)) > size - 4;
  const top = turned ? Math.min(80, Math.max(...columns.map(measure)) + 10) : 22;
  const height = Math.min(size, Math.max(MIN_CELL, 420 / rows.length));
  const every = (step) => Math.ceil(14 / step); // labels at least 14 pixels apart
  canvas.width = Math.round((left + size * columns.length + 1) * ratio);
  canvas.height = Math.round((top + height * rows.length + 1) * ratio);
  canvas.style.width = `${canvas.width / ratio}px`;
  canvas.style.height = `${canvas.height / ratio}px`;
  context.scale(ratio, ratio);
  context.font = `12px ${FONT}`;
  context.textBaseline = "middle";
  const colour = colours(panel);
  for (let i = 0; i < rows.length; i++)
    for (let j = 0; j < columns.length; j++)
      paintCell(context, panel, values[i][j], colour, left + j * size, top + i * height, size, height);
  context.fillStyle = css("--text");
  for (let i = 0; i < rows.length; i += every(height)) {
    context.textAlign = "right";
    context.font = `${i === selected ? 600 : 400} 12px ${FONT}`;
    context.fillText(clip(context, rows[i], left - 10), left - 6, top + (i + 0.5) * height);
  }
  context.font = `12px ${FONT}`;
  for (let j = 0; j < columns.length; j += every(size)) {
    context.save();
    context.translate(left + (j + 0.5) * size, top - 6);
    if (turned) context.rotate(-Math.PI / 2);
    context.textAlign = turned ? "left" : "center";
    context.fillText(clip(context, columns[j], turned ? top - 8 : size), 0, turned ? 0 : -5);
    context.restore();
  }
  if (selected !== null) {
    context.strokeStyle = css("--highlight");
    context.lineWidth = 2;
    context.strokeRect(left, top + selected * height, size * columns.length, height);
  }
  return { left, top, size, height };
}

const largestOf = ({ values }) => Math.max(1e-12, ...values.flat().map((value) => Math.abs(value ?? 0)));

function colours(panel) {
  const { scale } = panel;
  const largest = largestOf(panel);
  if (scale === "signed") return (value) => diverging(value / largest);
  return scale === "unit" ? (value) => heat(value) : (value) => heat(value / largest);
}

function paintCell(context, panel, value, colour, x, y, width, height) {
  const gap = width > 14 ? 1 : 0;
  if (value === null) {
    context.strokeStyle = css("--border");
    context.lineWidth = 1;
    context.strokeRect(x + 0.5, y + 0.5, width - 1 - gap, height - 1 - gap);
    context.beginPath();
    const inset = Math.min(width, height) * 0.32;
    context.moveTo(x + inset, y + inset);
    context.lineTo(x + width - inset, y + height - inset);
    context.moveTo(x + width - inset, y + inset);
    context.lineTo(x + inset, y + height - inset);
    context.strokeStyle = css("--muted");
    context.stroke();
    return;
  }
  const [red, green, blue] = colour(value);
  context.fillStyle = `rgb(${red} ${green} ${blue})`;
  context.fillRect(x, y, width - gap, height - gap);
  if (!panel.shows_numbers || width < 26 || height < 14) return;
  context.fillStyle = 0.299 * red + 0.587 * green + 0.114 * blue > 140 ? "#14161c" : "#ffffff";
  context.font = `${width < 34 ? 10 : 11.5}px ${FONT}`;
  context.textAlign = "center";
  context.fillText(short(value), x + (width - gap) / 2, y + height / 2);
}
