// Points in the plane with labels, some with an ellipse around them, or vectors from the origin in equal scales. A click
// on the plane may set two controls to its place.

import { html } from "../../html.js";
import { axisLabel } from "../../draw/numbers.js";
import { ticks } from "../../draw/ticks.js";

const SIZE = 320;
const MARGIN = 34;
const [LETTER, LINE] = [6.8, 13]; // pixels of a label

export function Scatter({ panel, onPick }) {
  const { points, arrows, place } = panel;
  const [xs, ys] = [points.map((p) => p.x), points.map((p) => p.y)];
  const reach = panel.reach ?? (arrows ? Math.max(...xs.map(Math.abs), ...ys.map(Math.abs), 1e-9) * 1.15 : null);
  const bounds = (values) => (reach ? [-reach, reach] : padded(Math.min(...values), Math.max(...values)));
  const [[x0, x1], [y0, y1]] = [bounds(xs), bounds(ys)];
  const x = (v) => MARGIN + ((v - x0) / (x1 - x0)) * (SIZE - 2 * MARGIN);
  const y = (v) => SIZE - MARGIN - ((v - y0) / (y1 - y0)) * (SIZE - 2 * MARGIN);
  const groups = [...new Set(points.map((p) => p.group))];
  const colour = (group) => `series-${groups.indexOf(group) % 6}`;
  const drawn = points.map((p) => ({ x: x(p.x), y: y(p.y), text: p.label, first: p.group !== "other" }));
  const labels = placeLabels(drawn, arrows);
  const named = points.filter((p) => p.label);
  const texts = named.length
    ? named.slice(0, 12).map((p) => `${p.label} (${axisLabel(p.x)}, ${axisLabel(p.y)})`)
    : groups.map((group) => `${points.filter((p) => p.group === group).length} ${group}`);
  const summary = `${panel.title}: ${texts.join(", ")}`;
  const choose = ({ clientX, clientY, currentTarget }) => {
    const { left, top, width } = currentTarget.getBoundingClientRect();
    const at = (pixels) => ((pixels / width) * SIZE - MARGIN) / (SIZE - 2 * MARGIN);
    onPick([x0 + at(clientX - left) * (x1 - x0), y1 - at(clientY - top) * (y1 - y0)]);
  };
  return html`<div class="instrument-plot instrument-square">
    <svg
      viewBox=${`0 0 ${SIZE} ${SIZE}`}
      role="img"
      aria-label=${summary}
      class=${place && "pickable"}
      onClick=${place && choose}
    >
      ${ticks(x0, x1, 4).map(
        (t) => html`<g key=${`x${t}`}>
          <line class="grid" x1=${x(t)} x2=${x(t)} y1=${MARGIN} y2=${SIZE - MARGIN} />
          <text x=${x(t)} y=${SIZE - MARGIN + 15} text-anchor="middle">${axisLabel(t)}</text>
        </g>`,
      )}
      ${ticks(y0, y1, 4).map(
        (t) => html`<g key=${`y${t}`}>
          <line class="grid" x1=${MARGIN} x2=${SIZE - MARGIN} y1=${y(t)} y2=${y(t)} />
          <text x=${MARGIN - 5} y=${y(t) + 4} text-anchor="end">${axisLabel(t)}</text>
        </g>`,
      )}
      ${points.map(
        (p, i) => html`<g key=${i} class=${colour(p.group)}>
          ${
            p.wide &&
            html`<ellipse
              class="cloud"
              cx=${x(p.x)}
              cy=${y(p.y)}
              rx=${x(p.x + p.wide[0]) - x(p.x)}
              ry=${y(p.y) - y(p.y + p.wide[1])}
            />`
          }
          ${arrows && html`<line class="arrow" x1=${x(0)} y1=${y(0)} x2=${x(p.x)} y2=${y(p.y)} />`}
          ${
            p.label
              ? html`<circle class="dot" cx=${x(p.x)} cy=${y(p.y)} r=${arrows ? 5 : 4}><title>${p.label}</title></circle>`
              : html`<circle class="dot unnamed" cx=${x(p.x)} cy=${y(p.y)} r="3" />`
          }
        </g>`,
      )}
      ${labels.map(
        (label, i) =>
          label && html`<text key=${i} class="name" x=${label.left} y=${label.top + 10}>${label.text}</text>`,
      )}
    </svg>
    ${
      groups.length > 1 &&
      html`<ul class="instrument-legend">
        ${groups.map(
          (group) => html`<li key=${group}><span class=${`instrument-key ${colour(group)}`}></span>${group}</li>`,
        )}
      </ul>`
    }
  </div>`;
}

// The place of each label beside its point, null where it would cover another label or point; those of the group
// "other" come last. Labels of arrows are on the outer side.
function placeLabels(points, arrows) {
  const taken = points.map(({ x, y }) => ({ left: x - 4, top: y - 4, width: 8, height: 8 }));
  const order = points.flatMap(({ text }, i) => (text ? [i] : [])).sort((a, b) => points[b].first - points[a].first);
  const found = points.map(() => null);
  for (const i of order) {
    const { x, y, text } = points[i];
    const width = LETTER * text.length;
    const sides = [
      [x + 8, y - 7],
      [x - 8 - width, y - 7],
    ];
    const places = [
      ...(arrows ? [sides[x < SIZE / 2 ? 1 : 0]] : sides),
      [x - width / 2, y - 20],
      [x - width / 2, y + 7],
      [x + 8, y + 3],
      [x + 8, y - 17],
    ];
    const boxes = places.map(([left, top]) => ({ text, left, top, width, height: LINE }));
    found[i] = boxes.find((box) => isInside(box) && !taken.some((other, j) => j !== i && overlaps(box, other))) ?? null;
    if (found[i]) taken.push(found[i]);
  }
  return found;
}

const isInside = ({ left, width }) => left >= 0 && left + width <= SIZE;
const overlaps = (a, b) =>
  a.left < b.left + b.width && b.left < a.left + a.width && a.top < b.top + b.height && b.top < a.top + a.height;

function padded(low, high) {
  const margin = (high - low || 1) * 0.08;
  return [low - margin, high + margin];
}
