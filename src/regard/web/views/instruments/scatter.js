// Points in the plane with labels, or vectors from the origin in equal scales.

import { html } from "../../html.js";
import { axisLabel, ticks } from "./format.js";

const SIZE = 320;
const MARGIN = 34;

export function Scatter({ panel }) {
  const { points, arrows } = panel;
  const [xs, ys] = [points.map((p) => p.x), points.map((p) => p.y)];
  const reach = Math.max(...xs.map(Math.abs), ...ys.map(Math.abs), 1e-9) * 1.15;
  const bounds = (values) => (arrows ? [-reach, reach] : padded(Math.min(...values), Math.max(...values)));
  const [[x0, x1], [y0, y1]] = [bounds(xs), bounds(ys)];
  const x = (v) => MARGIN + ((v - x0) / (x1 - x0)) * (SIZE - 2 * MARGIN);
  const y = (v) => SIZE - MARGIN - ((v - y0) / (y1 - y0)) * (SIZE - 2 * MARGIN);
  const groups = [...new Set(points.map((p) => p.group))];
  const colour = (p) => `series-${groups.indexOf(p.group) % 6}`;
  const summary = `${panel.title}: ${points
    .slice(0, 12)
    .map((p) => `${p.label} (${axisLabel(p.x)}, ${axisLabel(p.y)})`)
    .join(", ")}`;
  return html`<div class="instrument-plot instrument-square">
    <svg viewBox=${`0 0 ${SIZE} ${SIZE}`} role="img" aria-label=${summary}>
      ${ticks(x0, x1, 4).map(
        (t) => html`<line key=${`x${t}`} class="grid" x1=${x(t)} x2=${x(t)} y1=${MARGIN} y2=${SIZE - MARGIN} />`,
      )}
      ${ticks(y0, y1, 4).map(
        (t) => html`<line key=${`y${t}`} class="grid" x1=${MARGIN} x2=${SIZE - MARGIN} y1=${y(t)} y2=${y(t)} />`,
      )}
      ${points.map((p, i) => {
        const [a, b] = [x(p.x), y(p.y)];
        const right = a < SIZE * 0.66;
        return html`<g key=${i} class=${colour(p)}>
          ${arrows && html`<line class="arrow" x1=${x(0)} y1=${y(0)} x2=${a} y2=${b} />`}
          <circle class="dot" cx=${a} cy=${b} r=${arrows ? 5 : 4} />
          <text
            class="name"
            x=${a + (right ? 8 : -8)}
            y=${b + 4 + (arrows && i % 2 ? 12 : 0)}
            text-anchor=${right ? "start" : "end"}
            >${p.label}</text
          >
        </g>`;
      })}
    </svg>
  </div>`;
}

function padded(low, high) {
  const margin = (high - low || 1) * 0.08;
  return [low - margin, high + margin];
}
