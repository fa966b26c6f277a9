// Numbers, kinds of parts and layers as text.

const UNITS = ["", "k", "M", "G", "T", "P"];

// 134515008 -> "134.5 M"
export function compact(value) {
  let power = 0;
  while (Math.abs(value) >= 1000 && power < UNITS.length - 1) [value, power] = [value / 1000, power + 1];
  const digits = power === 0 || Math.abs(value) >= 100 ? 0 : 1;
  return `${value.toFixed(Number.isInteger(value) ? 0 : digits)}${UNITS[power] ? ` ${UNITS[power]}` : ""}`;
}

export const exact = (value) => value.toLocaleString("en");
export const percent = (value) => `${(100 * (value ?? NaN)).toFixed(value > 0.0005 && value < 0.0995 ? 1 : 0)} %`;

export const kindTitle = (kind) => kind.replaceAll("_", " ");
export const layerTitle = (depth) => (depth === 0 ? "input" : `block ${depth - 1}`);
