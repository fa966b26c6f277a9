// Numbers as text.

const UNITS = ["", "k", "M", "G", "T", "P"];

// 12345 -> "12.3 k", 0.00002 -> "2e-5", 0.25 -> "0.25"
export function compact(value) {
  const size = Math.abs(value);
  if (size >= 10_000) return scaled(value);
  if (size > 0 && size < 0.001) return value.toExponential(1).replace(".0e", "e");
  return String(Number(value.toPrecision(4)));
}

// Four digits, always the same number, so that a changing read-out does not jump.
export function precise(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 10_000) return Math.round(value).toLocaleString("en");
  return size < 0.001 ? value.toExponential(2) : value.toPrecision(4);
}

export const bytes = (count) => `${scaled(count)}${count < 1000 ? " B" : "B"}`;

// Three digits and a power of 1000: 134515008 -> "135 M"
function scaled(value) {
  const power = Math.min(Math.floor(Math.log10(Math.max(Math.abs(value), 1)) / 3), UNITS.length - 1);
  return `${Number((value / 1000 ** power).toPrecision(3))} ${UNITS[power]}`.trim();
}

// A share or a probability; small ones have two decimals.
export function percent(share) {
  const size = Math.abs(share);
  if (size > 0 && size < 0.0001) return "<0.01 %";
  return `${size === 0 ? 0 : (100 * share).toFixed(size < 0.01 ? 2 : 1)} %`;
}

export const bits = (nats) => nats / Math.LN2;

export function duration(seconds) {
  if (seconds < 90) return `${Math.max(1, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

// Thousands separated, four significant digits, exponents only where they help.
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

// For the ticks of an axis.
export const axisLabel = (value) => {
  const size = Math.abs(value);
  if (size >= 1e5 || (size > 0 && size < 1e-3)) {
    const [mantissa, exponent] = value.toExponential(1).split("e");
    return (Number(mantissa) === 1 ? "10" : `${Number(mantissa)}·10`) + superscript(exponent);
  }
  return value.toLocaleString("en", { maximumSignificantDigits: 4 });
};
