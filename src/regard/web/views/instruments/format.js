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

// For the inside of a cell: two decimals without the leading zero.
export function short(value) {
  if (value === 0) return "0";
  const text = Math.abs(value) >= 100 ? value.toFixed(0) : Math.abs(value) >= 10 ? value.toFixed(1) : value.toFixed(2);
  return text.replace(/^(-?)0\./, "$1.");
}

// A few round numbers from low to high.
export function ticks(low, high, count = 5) {
  if (!(high > low)) return [low];
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((m) => m >= rough * 0.999);
  const result = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-9; value += step)
    result.push(Math.abs(value) < step * 1e-9 ? 0 : value);
  return result;
}

// Powers of ten from low to high, both positive.
export function logTicks(low, high) {
  const from = Math.ceil(Math.log10(low) - 1e-9);
  const to = Math.floor(Math.log10(high) + 1e-9);
  const step = Math.max(1, Math.ceil((to - from) / 6));
  const result = [];
  for (let exponent = from; exponent <= to; exponent += step) result.push(10 ** exponent);
  return result.length ? result : [low, high];
}

export const axisLabel = (value) => {
  const size = Math.abs(value);
  if (size >= 1e5 || (size > 0 && size < 1e-3)) {
    const [mantissa, exponent] = value.toExponential(1).split("e");
    return (Number(mantissa) === 1 ? "10" : `${Number(mantissa)}·10`) + superscript(exponent);
  }
  return value.toLocaleString("en", { maximumSignificantDigits: 4 });
};
