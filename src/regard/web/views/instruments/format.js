// Numbers for people: thousands separated, four significant digits, exponents only where they help.

export function format(value, significant = 4) {
  if (typeof value !== "number") return value === null ? "" : String(value);
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (Number.isInteger(value) && size < 1e9) return value.toLocaleString("en");
  if (size >= 1e9 || (size > 0 && size < 1e-4)) {
    const [mantissa, exponent] = value.toExponential(2).split("e");
    return `${Number(mantissa)}·10${superscript(exponent)}`;
  }
  return value.toLocaleString("en", { maximumSignificantDigits: significant });
}

const SUPERSCRIPTS = {
  "-": "⁻",
  "+": "",
  0: "⁰",
  1: "¹",
  2: "²",
  3: "³",
  4: "⁴",
  5: "⁵",
  6: "⁶",
  7: "⁷",
  8: "⁸",
  9: "⁹",
};
const superscript = (text) => [...text].map((character) => SUPERSCRIPTS[character]).join("");

// For the inside of a cell: two decimals without the leading zero; integers as they are.
export function short(value) {
  if (Number.isInteger(value)) return String(value);
  const text = Math.abs(value) >= 100 ? value.toFixed(0) : Math.abs(value) >= 10 ? value.toFixed(1) : value.toFixed(2);
  return text.replace(/^-(0\.00)$/, "$1").replace(/^(-?)0\./, "$1.");
}

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

export const axisLabel = (value) => {
  const size = Math.abs(value);
  if (size >= 1e5 || (size > 0 && size < 1e-3)) {
    const [mantissa, exponent] = value.toExponential(1).split("e");
    return (Number(mantissa) === 1 ? "10" : `${Number(mantissa)}·10`) + superscript(exponent);
  }
  return value.toLocaleString("en", { maximumSignificantDigits: 4 });
};
