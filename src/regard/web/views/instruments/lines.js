// Curves over a common axis, as SVG: it follows the theme and the width without being drawn again. It is one tab stop:
// the arrow keys move from point to point.

import { html, useState } from "../../html.js";
import { axisLabel, format } from "../../draw/numbers.js";
import { logTicks, ticks } from "../../draw/ticks.js";
import { useWidth } from "../../draw/width.js";

const HEIGHT = 250;
const FRAME = { left: 56, right: 12, top: 32, bottom: 40 };
const CURVES = { y: FRAME.top - 5, height: HEIGHT - FRAME.bottom - FRAME.top + 10 }; // what is drawn of curves
const CLOSE = 90; // pixels between two marks whose labels would touch
const MARK = 14; // where the labels of marks and of the y axis are

function scale(values, log, from, to) {
  let [low, high] = [Math.min(...values), Math.max(...values)];
  if (log) {
    if (high <= low) [low, high] = [low / 2, high * 2];
    const [a, b] = [Math.log10(low), Math.log10(high)];
    return { at: (v) => from + ((Math.log10(v) - a) / (b - a)) * (to - from), ticks: logTicks(low, high) };
  }
  if (high - low < 1e-12 * Math.max(1, Math.abs(high))) [low, high] = [low - 0.5, high + 0.5];
  return {
    at: (v) => from + ((v - low) / (high - low)) * (to - from),
    ticks: ticks(low, high, Math.abs(to - from) / 60),
  };
}

export function Lines({ panel }) {
  const [frame, width] = useWidth();
  const [near, setNear] = useState(null); // pixels
  const [spoken, setSpoken] = useState("");
  const series = panel.series.filter(({ points }) => points.length > 0);
  if (series.length === 0) return html`<div ref=${frame}><p class="muted">nothing to show</p></div>`;
  const all = series.flatMap(({ points }) => points);
  const x = scale(
    all.map((p) => p[0]),
    panel.log_x,
    FRAME.left,
    width - FRAME.right,
  );
  const heights = all.flatMap((p) => p.slice(1)); // y, and the ends of an error bar
  const ends = [panel.top, panel.from_zero && !panel.log_y ? 0 : null].filter((end) => end !== null);
  const inside = heights.filter((height) => panel.top === null || height <= panel.top);
  const y = scale([...inside, ...ends], panel.log_y, HEIGHT - FRAME.bottom, FRAME.top);
  const point = (event) => {
    const box = frame.current.getBoundingClientRect();
    setNear(event.clientX - box.left);
  };
  const nearest = (points, at) =>
    points.reduce((a, b) => (Math.abs(x.at(b[0]) - at) < Math.abs(x.at(a[0]) - at) ? b : a));
  const move = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const places = [...new Set(all.map((p) => p[0]))].sort((a, b) => a - b);
    const from = near === null ? -step : places.indexOf(nearest(all, near)[0]);
    const value = places[Math.min(Math.max(from + step, 0), places.length - 1)];
    setNear(x.at(value));
    const values = series.map(({ name, points }) => `${name} ${format(nearest(points, x.at(value))[1])}`);
    setSpoken(`${panel.x} ${format(value)}: ${values.join(", ")}`);
  };
  const path = (points) =>
    points.map(([a, b], i) => `${i ? "L" : "M"}${x.at(a).toFixed(1)} ${y.at(b).toFixed(1)}`).join("");
  const found = near === null ? [] : series.map(({ points }) => nearest(points, near));
  const texts = series.map(
    ({ name, points }) => `${name}: from ${format(points[0][1])} to ${format(points.at(-1)[1])}`,
  );
  const place = found[0] ? `${panel.x} ${format(found[0][0])}` : "";
  const summary = `${panel.title}. ${texts.join("; ")}`;
  return html`<div class="instrument-plot" ref=${frame}>
    <svg
      width=${width}
      height=${HEIGHT}
      viewBox=${`0 0 ${width} ${HEIGHT}`}
      role="img"
      tabindex="0"
      aria-label=${`${summary}. Left and right arrow keys read the values.`}
      onPointerMove=${point}
      onPointerDown=${point}
      onPointerLeave=${(event) => event.pointerType !== "touch" && setNear(null)}
      onKeyDown=${move}
      onBlur=${() => setNear(null)}
    >
      ${x.ticks.map(
        (t) =>
          html`<g key=${`x${t}`}>
            <line class="grid" x1=${x.at(t)} x2=${x.at(t)} y1=${FRAME.top} y2=${HEIGHT - FRAME.bottom} />
            <text x=${x.at(t)} y=${HEIGHT - FRAME.bottom + 15} text-anchor="middle">${axisLabel(t)}</text>
          </g>`,
      )}
      ${y.ticks.map(
        (t) =>
          html`<g key=${`y${t}`}>
            <line class="grid" x1=${FRAME.left} x2=${width - FRAME.right} y1=${y.at(t)} y2=${y.at(t)} />
            <text x=${FRAME.left - 6} y=${y.at(t) + 4} text-anchor="end">${axisLabel(t)}</text>
          </g>`,
      )}
      <text class="axis" x=${(FRAME.left + width - FRAME.right) / 2} y=${HEIGHT - 6} text-anchor="middle">
        ${panel.x}
      </text>
      <text class="axis" x="0" y=${MARK} text-anchor="start">${panel.y}</text>
      ${panel.marks
        .filter((mark) => x.at(mark.x) >= FRAME.left - 1 && x.at(mark.x) <= width - FRAME.right + 1)
        .map(
          (mark) =>
            html`<${Mark}
              key=${mark.label}
              label=${mark.label}
              x=${x.at(mark.x)}
              anchor=${anchor(
                x.at(mark.x),
                panel.marks.map((other) => x.at(other.x)),
                width,
              )}
            />`,
        )}
      <svg
        class="curves"
        y=${CURVES.y}
        width=${width}
        height=${CURVES.height}
        viewBox=${`0 ${CURVES.y} ${width} ${CURVES.height}`}
      >
        ${series.map(
          ({ name, points }, i) => html`<path
            key=${name}
            class=${`curve series-${i % 6}`}
            d=${path(points)}
            stroke-dasharray=${i % 2 ? "6 4" : null}
          />`,
        )}
        ${series.flatMap(({ name, points }, i) =>
          points
            .filter(([, , low]) => low !== undefined)
            .map(
              ([a, b, low, high]) =>
                html`<g key=${`${name} ${a}`} class=${`series-${i % 6}`}>
                  <line class="range" x1=${x.at(a)} x2=${x.at(a)} y1=${y.at(low)} y2=${y.at(high)} />
                  <circle class="dot" cx=${x.at(a)} cy=${y.at(b)} r="3" />
                </g>`,
            ),
        )}
        ${found.map(
          (p, i) => html`<circle key=${i} class=${`dot series-${i % 6}`} cx=${x.at(p[0])} cy=${y.at(p[1])} r="4" />`,
        )}
      </svg>
    </svg>
    <p class="visually-hidden" aria-live="polite">${spoken}</p>
    <ul class="instrument-legend">
      ${series.map(
        ({ name }, i) =>
          html`<li key=${name}>
            <span class=${`instrument-key series-${i % 6}`}></span
            >${name}${found[i] ? html`<b class="number"> ${format(found[i][1])}</b>` : ""}
          </li>`,
      )}
      <li class="muted">${place}</li>
    </ul>
  </div>`;
}

// The side of a mark on which its label is: away from a close mark, and inside of the plot.
function anchor(x, marks, width) {
  if (x > width - 60 || marks.some((other) => other > x && other < x + CLOSE)) return "end";
  return marks.some((other) => other < x && other > x - CLOSE) ? "start" : "middle";
}

// A vertical line with its label above it; the label of the y axis is at the left.
function Mark({ label, x, anchor }) {
  return html`<g>
    <line class="mark" x1=${x} x2=${x} y1=${FRAME.top - 8} y2=${HEIGHT - FRAME.bottom} />
    <text class="axis" x=${x} y=${FRAME.top - 11} text-anchor=${anchor}>${label}</text>
  </g>`;
}
