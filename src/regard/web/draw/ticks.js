// Round numbers for the ticks of an axis.

// A few round numbers from low to high, three or more.
export function ticks(low, high, count = 5) {
  if (!(high > low)) return [low];
  const rough = (high - low) / Math.max(count, 3);
  const power = 10 ** Math.floor(Math.log10(rough));
  const steps = [0.5, 1, 2, 5, 10].map((m) => m * power);
  const inside = (step) => Math.floor(high / step + 1e-9) - Math.ceil(low / step - 1e-9) + 1;
  const step = steps.findLast((m) => m <= rough * 2.5 && inside(m) >= 3) ?? steps[0];
  const result = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-9; value += step)
    result.push(Math.abs(value) < step * 1e-9 ? 0 : value);
  return result;
}

// Powers of ten from low to high, both positive; within less than two of them also 2 and 5 times a power.
export function logTicks(low, high) {
  const from = Math.ceil(Math.log10(low) - 1e-9);
  const to = Math.floor(Math.log10(high) + 1e-9);
  const step = Math.max(1, Math.ceil((to - from) / 6));
  const result = [];
  for (let exponent = from; exponent <= to; exponent += step) result.push(10 ** exponent);
  if (result.length > 2) return result;
  const all = [from - 1, from, from + 1].flatMap((exponent) => [1, 2, 5].map((m) => m * 10 ** exponent));
  const some = all.filter((value) => value >= low * 0.999 && value <= high * 1.001);
  return some.length > 1 ? some : [low, high];
}
