// Curves as uPlot wants them: one x for all lines, and for each line what is drawn of it.

// {data: [x, values, …], layers: [{line, part}, …]}: every layer is one series of uPlot. The parts of a line are "low"
// and "high", between which a band is filled, "raw", the faint line under a smoothed one, and "main".
// lines: see chart.js. hidden: the labels of lines that are not drawn.
export function arrange({ x, lines, smooth, logX, logY, hidden }) {
  const own = lines.some((line) => line.x);
  const xs = own ? union(lines.map((line) => line.x ?? x)) : Array.from(x);
  if (logX) xs.forEach((value, i) => value > 0 || (xs[i] = null));
  const data = [xs];
  const layers = [];
  lines.forEach((line, index) => {
    if (hidden.has(line.label)) return;
    const add = (part, values) => {
      const placed = own ? place(line.x ?? x, values, xs) : Array.from(values);
      data.push(logY ? placed.map((value) => (value > 0 ? value : null)) : placed);
      layers.push({ line: index, part });
    };
    const smoothed = smooth > 0 && !line.markers;
    if (smoothed) add("raw", line.values);
    else if (line.low) (add("low", line.low), add("high", line.high));
    add("main", smoothed ? movingAverage(line.values, smooth) : line.values);
  });
  if (logX && xs.includes(null)) return { layers, data: withoutNulls(data) };
  return { layers, data };
}

function union(columns) {
  const all = new Set();
  for (const column of columns) for (const value of column) all.add(value);
  return [...all].sort((a, b) => a - b);
}

function place(x, values, xs) {
  const known = new Map();
  for (let i = 0; i < x.length; i++) known.set(x[i], values[i]);
  return xs.map((value) => known.get(value) ?? null);
}

function withoutNulls(data) {
  const kept = data[0].flatMap((value, i) => (value === null ? [] : [i]));
  return data.map((column) => kept.map((i) => column[i]));
}

// The mean of exponential moving averages from both ends, which does not lag behind a falling curve. `weight` is that
// of the values before.
function movingAverage(values, weight) {
  const [forward, backward] = [averageOf(values, weight), averageOf([...values].reverse(), weight).reverse()];
  return forward.map((value, i) => (value === null ? null : (value + backward[i]) / 2));
}

function averageOf(values, weight) {
  let [sum, total] = [0, 0];
  return Array.from(values, (value) => {
    if (value === null || value === undefined || !Number.isFinite(value)) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

// The value of a column at an index, or the last one before it.
export function valueAt(column, index) {
  for (let i = index; i >= 0; i--) if (column[i] !== null && column[i] !== undefined) return column[i];
  return null;
}
