// Curves, drawn by uPlot in the colours of the theme, with a legend that reads them: it has the values under the
// pointer (or the arrow keys), else the last ones, and a click on an entry hides its line. Dragging zooms into a part,
// a double click shows all again.

import { html, useLayoutEffect, useMemo, useRef, useSignal, useState } from "../html.js";
import uPlot from "../vendor/uplot.js";
import { css, series as seriesColour } from "./colours.js";
import { arrange, valueAt } from "./curves.js";
import { compact, precise } from "./numbers.js";
import { theme } from "./theme.js";

// distances of ticks: 1, 2, 5, 10, 20, …
const WHOLE = Array.from({ length: 45 }, (_, i) => [1, 2, 5][i % 3] * 10 ** Math.floor(i / 3));

// x: numbers in rising order
// lines: [{label, values: [number or null]}, …], each optionally with
//   x        its own, instead of that of the chart
//   low, high  of the band around it
//   dash     [6, 4] for a dashed line;  markers  points instead of a line
//   colour   the index of its colour, else its own index
// smooth: 0 to below 1; the unsmoothed line stays visible, faintly.
// sync: charts of the same name have a common pointer. height: of the plot, without the legend.
// The picture is described to screen readers by `title`.
export function Chart({
  title,
  x = [],
  lines,
  xLabel,
  yLabel,
  height = 260,
  logX = false,
  logY = false,
  smooth = 0,
  legend = true,
  sync,
}) {
  const frame = useRef();
  const plot = useRef(null);
  const zoomed = useRef(false);
  const [hidden, setHidden] = useState(new Set());
  const [index, setIndex] = useState(null);
  const [spoken, setSpoken] = useState("");
  const colours = useSignal(theme);
  const { data, layers } = useMemo(
    () => arrange({ x, lines, smooth, logX, logY, hidden }),
    [x, lines, smooth, logX, logY, hidden],
  );
  const styles = lines.map(({ label, dash, markers, colour }) => ({ label, dash, markers, colour, own: !!lines[0].x }));
  const whole = !logX && data[0].every(Number.isInteger); // steps have no fractions
  const structure = JSON.stringify([layers, styles, xLabel, yLabel, height, logX, logY, whole, sync, colours]);

  useLayoutEffect(() => {
    const element = frame.current; // the reference is null when the view is left, the observer still reports once
    const width = element.clientWidth;
    const settings = { layers, styles, xLabel, yLabel, width, height, logX, logY, whole, sync };
    const [onCursor, onZoom] = [(u) => setIndex(u.cursor.idx), () => (zoomed.current = true)];
    const drawn = new uPlot(options(settings, onCursor, onZoom), data, element);
    drawn.over.addEventListener("dblclick", () => (zoomed.current = false));
    plot.current = drawn;
    zoomed.current = false;
    const resized = new ResizeObserver(() => drawn.setSize({ width: element.clientWidth, height }));
    resized.observe(element);
    return () => {
      resized.disconnect();
      drawn.destroy();
    };
  }, [structure]);
  useLayoutEffect(() => {
    if (plot.current.data !== data) plot.current.setData(data, !zoomed.current);
  }, [data]);

  const last = data[0].length - 1;
  const shown = index === null || index > last ? last : index;
  const values = new Map(layers.map(({ line, part }, i) => [`${line} ${part}`, valueAt(data[i + 1], shown)]));
  const read = (line) => values.get(`${line} main`) ?? null;
  const toggle = (label) => {
    const next = new Set(hidden);
    if (!next.delete(label)) next.add(label);
    setHidden(next);
  };
  const onKeyDown = (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -Infinity, End: Infinity }[event.key];
    if (move === undefined || last < 0) return;
    event.preventDefault();
    const next = Math.min(Math.max(shown + move, 0), last);
    plot.current.setCursor({ left: plot.current.valToPos(data[0][next], "x"), top: 0 });
    const texts = lines.flatMap(({ label }, line) =>
      hidden.has(label) ? [] : [`${label} ${text(valueOf(data, layers, line, next))}`],
    );
    setSpoken(`${xLabel ?? "x"} ${compact(data[0][next])}: ${texts.join(", ")}`);
  };
  return html`<div class="chart">
    <div class="chart-plot" role="img" aria-label=${title} tabindex="0" ref=${frame} onKeyDown=${onKeyDown}></div>
    <p class="visually-hidden" aria-live="polite">${spoken}</p>
    ${legend &&
    lines.length > 0 &&
    html`<${Legend}
      lines=${lines}
      hidden=${hidden}
      onToggle=${toggle}
      read=${read}
      at=${index === null ? null : data[0][shown]}
      xLabel=${xLabel}
    />`}
  </div>`;
}

function Legend({ lines, hidden, onToggle, read, at, xLabel }) {
  return html`<ul class="chart-legend">
    ${lines.map(
      ({ label, colour, dash, markers }, i) => html`<li key=${label}>
        <button
          type="button"
          class="chart-entry"
          aria-pressed=${String(!hidden.has(label))}
          title=${hidden.has(label) ? `Show ${label}` : `Hide ${label}`}
          onClick=${() => onToggle(label)}
        >
          <span
            class=${markers ? "chart-swatch dots" : dash ? "chart-swatch dashed" : "chart-swatch"}
            style=${{ color: seriesColour(colour ?? i) }}
          ></span>
          ${label} <b class="number">${hidden.has(label) ? "" : text(read(i))}</b>
        </button>
      </li>`,
    )}
    ${at !== null && at !== undefined && html`<li class="chart-at number">${xLabel ?? "x"} ${compact(at)}</li>`}
  </ul>`;
}

const text = (value) => (value === null ? "–" : precise(value));

function valueOf(data, layers, line, index) {
  const layer = layers.findIndex((each) => each.line === line && each.part === "main");
  return layer < 0 ? null : valueAt(data[layer + 1], index);
}

function options({ layers, styles, width, height, xLabel, yLabel, logX, logY, whole, sync }, onCursor, onZoom) {
  const [ink, grid] = [css("--muted"), css("--border")];
  const axis = {
    stroke: ink,
    font: "12px system-ui, sans-serif",
    labelFont: "12px system-ui, sans-serif",
    grid: { stroke: grid, width: 1 },
    ticks: { show: false },
    values: (u, splits) => splits.map((value) => (value === null ? "" : compact(value))),
  };
  const bands = layers.flatMap(({ line, part }, i) =>
    part === "high" ? [{ series: [i + 1, i], fill: fade(colourOf(styles, line), 0.18) }] : [],
  );
  return {
    width,
    height,
    padding: [10, 20, 0, 0],
    scales: { x: { time: false, distr: logX ? 3 : 1 }, y: { distr: logY ? 3 : 1 } },
    axes: [
      { ...axis, label: xLabel, labelSize: xLabel ? 18 : 0, size: 26, gap: 4, ...(whole ? { incrs: WHOLE } : {}) },
      { ...axis, label: yLabel, labelSize: yLabel ? 18 : 0, size: axisWidth, gap: 6 },
    ],
    series: [{}, ...layers.map(({ line, part }) => layerStyle(styles[line], part, colourOf(styles, line)))],
    bands,
    legend: { show: false },
    cursor: {
      y: false,
      points: { size: 7, width: 2 },
      drag: { setScale: true, x: true, y: false },
      ...(sync ? { sync: { key: sync, setSeries: false } } : {}),
    },
    hooks: { setCursor: [onCursor], setSelect: [(u) => u.select.width > 0 && onZoom()] },
  };
}

const colourOf = (styles, line) => seriesColour(styles[line].colour ?? line);
const fade = (colour, share) => colour.replace(")", ` / ${share})`);

// As wide as the longest number.
function axisWidth(u, values) {
  const longest = Math.max(0, ...(values ?? []).map((value) => value.length));
  return 14 + 7 * longest;
}

function layerStyle({ dash, markers, own }, part, colour) {
  const plain = { spanGaps: own, points: { show: false } };
  if (part === "low" || part === "high") return { stroke: "transparent", width: 0, ...plain };
  if (part === "raw") return { stroke: fade(colour, 0.28), width: 1, ...plain };
  return {
    stroke: colour,
    width: markers ? 1 : 2,
    dash: markers ? [2, 4] : dash,
    spanGaps: own,
    points: markers ? { show: true, size: 7, fill: colour, stroke: css("--surface"), width: 1.5 } : { show: false },
  };
}
