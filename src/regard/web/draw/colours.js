// The theme's colours for canvases: scales from a number to [red, green, blue], and the colours of series.

import { theme } from "./theme.js";

const cache = new Map(); // until the theme changes
theme.subscribe(() => cache.clear()); // subscribed before any view, so that views read the new colours

// The colour of a CSS variable as [red, green, blue] in 0 to 255.
export function rgb(variable) {
  if (!cache.has(variable)) {
    const probe = document.createElement("span");
    probe.style.color = `var(${variable})`;
    document.body.append(probe);
    cache.set(variable, getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3).map(Number));
    probe.remove();
  }
  return cache.get(variable);
}

export const css = (variable) => `rgb(${rgb(variable).join(" ")})`;
export const series = (index) => css(`--series-${index % 6}`);

const mix = (a, b, t) => a.map((c, k) => Math.round(c + (b[k] - c) * t));
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

// 0 to 1. On a square-root scale small attention weights stay visible; `linear` for anything else.
export function heat(value, linear = false) {
  const t = 2 * (linear ? clamp(value, 0, 1) : Math.sqrt(clamp(value, 0, 1)));
  return t < 1 ? mix(rgb("--heat-0"), rgb("--heat-1"), t) : mix(rgb("--heat-1"), rgb("--heat-2"), t - 1);
}

// -1 to 1
export function diverging(value) {
  const t = clamp(value, -1, 1);
  return mix(rgb("--zero"), rgb(t < 0 ? "--negative" : "--positive"), Math.abs(t));
}

// 256 colours as RGBA bytes in a Uint32Array, for painting many cells: index = round(255 * value), or with
// `signed` round(127.5 * (value + 1)).
export function table({ signed = false, linear = false } = {}) {
  const key = `table ${signed} ${linear}`;
  if (!cache.has(key)) {
    const bytes = new Uint8ClampedArray(1024).fill(255);
    for (let i = 0; i < 256; i++) bytes.set(signed ? diverging(i / 127.5 - 1) : heat(i / 255, linear), 4 * i);
    cache.set(key, new Uint32Array(bytes.buffer));
  }
  return cache.get(key);
}
