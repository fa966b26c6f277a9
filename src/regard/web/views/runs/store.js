// The runs of the server and the curves of those that are compared, polled while the view is open.

import * as api from "../../api.js";
import { signal } from "../../html.js";
import { poll } from "../../poll.js";
import { stored } from "../../state.js";

const POINTS = 800; // of a curve, about as many as a screen shows
const ACTIVE = 1000; // milliseconds between two requests while something trains
const IDLE = 5000;

// {folder, runs, process, may_start}, or null before it is known
export const listed = signal(null);
export const failure = signal("");
// {run: {cursor, step, columns: {name: {steps, values, low, high}}}}
export const curves = signal({});
// The names of the compared runs in the order of their colours; null: not chosen yet.
export const chosen = stored("runs-compared", null);
if (!Array.isArray(chosen.value)) chosen.value = null;

export const isActive = (run) => !["finished", "stopped", "damaged", "failed"].includes(run.stage);

// The compared runs that exist; if none was chosen, the one that trains, or the newest.
export function compared(list, names) {
  if (!list) return [];
  const known = new Map(list.runs.map((run) => [run.run, run]));
  const picked = (names ?? []).filter((name) => known.has(name)).map((name) => known.get(name));
  if (picked.length || names?.length === 0) return picked;
  return [...list.runs].sort((a, b) => isActive(b) - isActive(a) || b.changed - a.changed).slice(0, 1);
}

export function compare(name, on) {
  const names = compared(listed.value, chosen.value).map((run) => run.run);
  chosen.value = on ? [...names.filter((each) => each !== name), name] : names.filter((each) => each !== name);
  refresh();
}

let last = Promise.resolve(); // one update at a time: two at once would append the same points twice
export const refresh = () => (last = last.then(update, update));

async function update() {
  try {
    const list = await api.listRuns();
    listed.value = list;
    failure.value = "";
    await readCurves(compared(list, chosen.value));
  } catch (error) {
    if (!(error instanceof api.ApiError)) throw error;
    failure.value = error.status === 404 && !listed.value ? "This server shows no runs." : error.message;
  }
}

async function readCurves(runs) {
  const behind = runs.filter((run) => curves.value[run.run]?.step !== run.step || isActive(run));
  if (!behind.length) return;
  const positions = behind.map(({ run }) => ({ run, cursor: curves.value[run]?.cursor ?? null }));
  const { runs: found } = await api.runMetrics(positions.slice(0, 16), POINTS);
  const next = { ...curves.value };
  for (const { run, step } of behind) if (found[run]) next[run] = { ...merged(next[run], found[run]), step };
  curves.value = next;
}

// The known curves with what is new. Curves that have grown too long are read again as a whole next time.
function merged(known, { cursor, restarted, curves: added }) {
  if (restarted || !known) return { cursor, columns: added };
  if (!Object.keys(added).length) return known;
  const columns = { ...known.columns };
  for (const [name, curve] of Object.entries(added)) columns[name] = joined(columns[name], curve);
  const longest = Math.max(...Object.values(columns).map((curve) => curve.steps.length));
  return { cursor: longest > 2 * POINTS ? null : cursor, columns };
}

function joined(a, b) {
  if (!a) return b;
  const bounded = a.low || b.low;
  return {
    steps: [...a.steps, ...b.steps],
    values: [...a.values, ...b.values],
    low: bounded && [...(a.low ?? a.values), ...(b.low ?? b.values)],
    high: bounded && [...(a.high ?? a.values), ...(b.high ?? b.values)],
  };
}

// Asks for the list and the curves until the returned function is called.
export const watch = () => poll(refresh, listed, () => (isAnythingActive(listed.value) ? ACTIVE : IDLE));

const isAnythingActive = (list) =>
  list && (list.runs.some(isActive) || (list.process && list.process.stage !== "failed"));
