// The loss curves of the compared runs, and every other number that they log as small multiples.

import { html, useMemo, useSignal } from "../../html.js";
import { Check, Segments, Slider } from "../../controls.js";
import { Chart } from "../../draw/chart.js";
import { stored } from "../../state.js";
import { chosen, compared, curves, listed } from "./store.js";

const options = stored("runs-curves", { by: "step", smooth: 0.9, logX: false, logY: true });
const TITLES = {
  accuracy: "Accuracy",
  grad_norm: "Gradient norm",
  lr: "Learning rate",
  tokens_per_second: "Tokens per second",
  seconds: "Seconds per step",
  memory: "Memory",
  tokens: "Tokens so far",
};
const FIRST = ["accuracy", "grad_norm", "lr", "tokens_per_second", "seconds"];
const UNSMOOTHED = new Set(["lr", "tokens"]);

export function Curves() {
  const runs = compared(useSignal(listed), useSignal(chosen));
  const known = useSignal(curves);
  const chosenOptions = useSignal(options);
  const { by, smooth, logX, logY } = chosenOptions;
  const set = (change) => (options.value = { ...options.value, ...change });
  const names = runs.map((run) => run.run).filter((name) => known[name]);
  const key = names.map((name) => known[name]);
  const loss = useMemo(() => lossLines(names, known, by), [...key, names.join("\n"), by]);
  const monitors = useMemo(() => monitorLines(names, known, by), [...key, names.join("\n"), by]);
  if (!runs.length) return html`<p class="notice">Choose a run to see its curves.</p>`;
  if (!loss.length) return html`<p class="notice">${runs.map((run) => run.run).join(", ")}: no step is logged yet.</p>`;
  const axes = { xLabel: by === "step" ? "step" : "tokens", logX, sync: "runs" };
  return html`<section class="panel runs-curves" aria-labelledby="runs-loss">
      <div class="runs-head">
        <h2 id="runs-loss">Loss</h2>
        <div class="runs-controls">
          <${Segments}
            label="Horizontal axis"
            value=${by}
            choices=${[["step", "steps"], ["tokens", "tokens"]]}
            onChange=${(value) => set({ by: value })}
          />
          <${Check} label="log x" value=${logX} onChange=${(value) => set({ logX: value })} />
          <${Check} label="log y" value=${logY} onChange=${(value) => set({ logY: value })} />
          <div class="runs-smooth">
            <${Slider}
              label="Smoothing"
              value=${smooth}
              min=${0}
              max=${0.99}
              step=${0.01}
              format=${(value) => value.toFixed(2)}
              onChange=${(value) => set({ smooth: value })}
            />
          </div>
        </div>
      </div>
      <${Chart}
        title=${`Loss over ${axes.xLabel} of ${names.join(", ")}`}
        lines=${loss}
        yLabel="loss"
        height=${340}
        logY=${logY}
        smooth=${smooth}
        ...${axes}
      />
      <p class="runs-hint">Drag to zoom, double-click to reset. Points: loss on held-out text.</p>
    </section>
    <section aria-labelledby="runs-monitors">
      <h2 id="runs-monitors" class="runs-subtitle">Monitors</h2>
      <div class="runs-monitors">
        ${monitors.map(
          ([column, lines]) => html`<div class="panel" key=${column}>
            <h3>${TITLES[column] ?? column.replaceAll("_", " ")}</h3>
            <${Chart}
              title=${`${TITLES[column] ?? column} over ${axes.xLabel}`}
              lines=${lines}
              height=${150}
              smooth=${UNSMOOTHED.has(column) ? 0 : smooth}
              ...${{ ...axes, xLabel: undefined }}
            />
          </div>`,
        )}
      </div>
    </section>`;
}

// Training loss as a line and held-out loss as points, in the colour of the run, or in two if there is only one run.
function lossLines(names, known, by) {
  const label = (name, what) => (names.length === 1 ? what : `${name}, ${what}`);
  return names.flatMap((name, i) => {
    const { columns } = known[name];
    const line = (column, what, style) =>
      columns[column] ? [{ label: label(name, what), colour: i, ...curve(columns, column, by), ...style }] : [];
    return [
      ...line("loss", "training", {}),
      ...line("held_out_loss", "held out", { markers: true, colour: names.length === 1 ? 1 : i }),
    ];
  });
}

function monitorLines(names, known, by) {
  const all = new Set(names.flatMap((name) => Object.keys(known[name].columns)));
  const drawn = ["loss", "held_out_loss", ...(by === "step" ? ["tokens"] : [])];
  const shown = [...all].filter((column) => !drawn.includes(column));
  const own = shown.filter((column) => !column.startsWith("held_out_"));
  const order = (column) => (FIRST.includes(column) ? FIRST.indexOf(column) : FIRST.length);
  own.sort((a, b) => order(a) - order(b) || a.localeCompare(b));
  const lines = (column) =>
    names.flatMap((name, i) => {
      const { columns } = known[name];
      const label = names.length === 1 ? "training" : name;
      const line = columns[column] ? [{ label, colour: i, ...curve(columns, column, by) }] : [];
      const heldOut = columns[`held_out_${column}`];
      const other = heldOut
        ? [
            {
              label: names.length === 1 ? "held out" : `${name}, held out`,
              colour: names.length === 1 ? 1 : i,
              markers: true,
              ...curve(columns, `held_out_${column}`, by),
            },
          ]
        : [];
      return [...line, ...other];
    });
  const lonely = shown.filter((column) => column.startsWith("held_out_") && !all.has(column.slice("held_out_".length)));
  return [...own, ...lonely].map((column) => [column, lines(column)]);
}

// The points of a column over steps, or over the tokens of those steps.
function curve(columns, column, by) {
  const { steps, values, low, high } = columns[column];
  if (by === "step" || !columns.tokens) return { x: steps, values, low, high };
  return { x: tokensAt(columns.tokens, steps), values, low, high };
}

// A held-out loss has a step, but no count of tokens: that of the last training step before it.
function tokensAt({ steps, values, high }, wanted) {
  const tokens = high ?? values;
  let i = 0;
  return wanted.map((step) => {
    while (i + 1 < steps.length && steps[i + 1] <= step) i++;
    return tokens[i];
  });
}
