// Curves, drawn by uPlot in the colours of the theme.

import { html, useEffect, useRef } from "../html.js";
import uPlot from "../vendor/uplot.js";
import { css, series as seriesColour } from "./colours.js";

// x: numbers in rising order; lines: [{label, values: [number or null], dash}]; logX, logY: logarithmic axes.
// The picture is described to screen readers by `title`.
export function Chart({ title, x, lines, xLabel, yLabel, height = 260, logX = false, logY = false }) {
  const frame = useRef();
  useEffect(() => {
    let plot = null;
    const draw = () => {
      plot?.destroy();
      const width = frame.current.clientWidth;
      plot = new uPlot(options({ width, height, lines, xLabel, yLabel, logX, logY }), data(x, lines), frame.current);
    };
    draw();
    const resized = new ResizeObserver(() => plot.setSize({ width: frame.current.clientWidth, height }));
    resized.observe(frame.current);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", draw);
    const themed = new MutationObserver(draw);
    themed.observe(document.documentElement, { attributeFilter: ["data-theme"] });
    return () => {
      resized.disconnect();
      themed.disconnect();
      dark.removeEventListener("change", draw);
      plot.destroy();
    };
  }, [title, x, lines, xLabel, yLabel, height, logX, logY]);
  return html`<div class="chart" role="img" aria-label=${title} ref=${frame}></div>`;
}

const data = (x, lines) => [x, ...lines.map(({ values }) => values)];

function options({ width, height, lines, xLabel, yLabel, logX, logY }) {
  const [text, grid] = [css("--muted"), css("--border")];
  const axis = { stroke: text, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, labelSize: 22 };
  return {
    width,
    height,
    scales: { x: { time: false, distr: logX ? 3 : 1 }, y: { distr: logY ? 3 : 1 } },
    axes: [
      { ...axis, label: xLabel },
      { ...axis, label: yLabel, size: 62 },
    ],
    series: [
      { label: xLabel },
      ...lines.map(({ label, dash }, i) => ({ label, stroke: seriesColour(i), width: 2, dash, points: { show: false } })),
    ],
    legend: { show: lines.length > 0 },
  };
}
