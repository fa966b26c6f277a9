// Numbers as short text.

const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const UNITS = ["B", "kB", "MB", "GB", "TB"];

// 12345 -> "12.3K", 0.00002 -> "2e-5", 0.25 -> "0.25"
export function compact(value) {
  const size = Math.abs(value);
  if (size >= 10_000) return COMPACT.format(value);
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

export function bytes(count) {
  const power = count < 1 ? 0 : Math.min(Math.floor(Math.log10(count) / 3), UNITS.length - 1);
  return `${Number((count / 1000 ** power).toPrecision(3))} ${UNITS[power]}`;
}

export function duration(seconds) {
  if (seconds < 90) return `${Math.max(1, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}
