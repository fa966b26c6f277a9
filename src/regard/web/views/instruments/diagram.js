// Nodes at given positions and weighted edges between them; pointing at a node brings out its edges.

import { classes, html, useState } from "../../html.js";
import { short } from "../../draw/numbers.js";
import { useWidth } from "../../draw/width.js";

const MARGIN_Y = 26;

export function Diagram({ panel, onPick }) {
  const [near, setNear] = useState(null);
  const [frame, width] = useWidth();
  const { nodes, edges, sets, selected } = panel;
  const rows = new Set(nodes.map((node) => node.y.toFixed(3))).size;
  const height = Math.min(430, Math.max(150, 50 * rows + 40));
  // nodes side by side share the width
  const room = (node) => (width - 8) / nodes.filter((other) => Math.abs(other.y - node.y) * height < 30).length - 6;
  const size = (node) => Math.max(24, Math.min(room(node), 7.1 * node.label.length + 14));
  const edge = Math.max(...nodes.filter(({ x }) => x === 0 || x === 1).map(size), 30) / 2 + 2;
  const x = (node) => edge + node.x * (width - 2 * edge);
  const y = (node) => MARGIN_Y + node.y * (height - 2 * MARGIN_Y);
  const byId = Object.fromEntries(nodes.map((node) => [node.id, node]));
  const largest = Math.max(...edges.map(({ weight }) => Math.abs(weight)), 1e-9);
  const focus = near ?? (sets && selected !== null ? nodes[selected].id : null);
  const texts = nodes.map(({ label, value }) => (value === null ? label : `${label} ${short(value)}`));
  const summary = `${panel.title}: ${texts.join(", ")}`;
  return html`<div class="instrument-plot" ref=${frame}>
    <svg width=${width} height=${height} viewBox=${`0 0 ${width} ${height}`} role="img" aria-label=${summary}>
      ${edges.map(({ from, to, weight }, i) => {
        const [a, b] = [byId[from], byId[to]];
        const dim = focus !== null && from !== focus && to !== focus;
        return html`<line
          key=${i}
          class=${classes("edge", weight < 0 && "negative", dim && "dim")}
          x1=${x(a)}
          y1=${y(a)}
          x2=${x(b)}
          y2=${y(b)}
          stroke-width=${0.6 + (3.4 * Math.abs(weight)) / largest}
        />`;
      })}
      ${nodes.map((node, i) => {
        const box = size(node);
        const text = node.label.length * 7.1 > box ? `${node.label.slice(0, Math.floor(box / 7.1) - 1)}…` : node.label;
        const inside = node.value !== null;
        return html`<g
          key=${node.id}
          class=${classes("node", sets && "pickable", node.id === focus && "focus")}
          onPointerEnter=${() => setNear(node.id)}
          onPointerLeave=${() => setNear(null)}
          onClick=${() => onPick(i)}
        >
          <rect
            x=${x(node) - box / 2}
            y=${y(node) - (inside ? 18 : 13)}
            width=${box}
            height=${inside ? 36 : 26}
            rx="10"
          />
          <text x=${x(node)} y=${y(node) + (inside ? -3 : 4)} text-anchor="middle"
            >${text}<title>${node.label}</title></text
          >
          ${
            inside &&
            html`<text class="value" x=${x(node)} y=${y(node) + 12} text-anchor="middle">${short(node.value)}</text>`
          }
        </g>`;
      })}
    </svg>
  </div>`;
}
