// Weights as an image of one pixel per cell.

import { table } from "./colours.js";

// part: {weights, second, width, pool, rows: [first, end], columns: [first, end], first, peak} (flat arrays).
// options: {scale: "absolute", "map" or "row", linear, threshold, hideFirst, signed, largest, matches}; `largest` is
// the limit of the scale of the map, `matches` null or {rows, columns}, arrays of 0 and 1 by token.
export function paintCells(part, options) {
  const { weights, pool } = part;
  const width = Math.ceil((part.columns[1] - part.columns[0]) / pool);
  const height = Math.ceil((part.rows[1] - part.rows[0]) / pool);
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [width, height];
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  const colour = options.signed ? signedColour(options) : unsignedColour(options);
  const { threshold } = options;
  const columns = new Uint8Array(width); // whether a token of the column matches
  if (options.matches) {
    for (let c = 0; c < width; c++) columns[c] = matchesAny(options.matches.columns, part.columns[0] + c * pool, pool);
  }
  const hidesFirst = options.hideFirst && part.columns[0] === 0;
  for (let r = 0; r < height; r++) {
    const limit = options.scale === "row" ? rowLimit(part, r, options) : options.scale === "map" ? options.largest : 1;
    const anyColumn = !options.matches || matchesAny(options.matches.rows, part.rows[0] + r * pool, pool);
    for (let c = 0; c < width; c++) {
      const i = r * width + c;
      const weight = hidesFirst && c === 0 ? (pool > 1 ? part.second[r] : 0) : weights[i];
      if (weight === 0 || Math.abs(weight) < threshold || !(anyColumn || columns[c])) continue; // transparent
      pixels[i] = colour(weight / limit);
    }
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

function matchesAny(matches, first, count) {
  for (let i = first; i < first + count && i < matches.length; i++) if (matches[i]) return true;
  return false;
}

function unsignedColour({ linear }) {
  const colours = table({ linear });
  return (value) => colours[value >= 1 ? 255 : Math.round(255 * value)];
}

function signedColour({ linear }) {
  const colours = table({ signed: true });
  return (value) => {
    const size = Math.min(1, Math.abs(value));
    return colours[Math.round(127.5 * (1 + Math.sign(value) * (linear ? size : Math.sqrt(size))))];
  };
}

// The largest weight of a row of cells, over all keys, also those that the part has not.
function rowLimit({ first, peak, pool }, r, { hideFirst }) {
  let limit = 0;
  for (let i = r * pool; i < (r + 1) * pool && i < peak.length; i++) {
    limit = Math.max(limit, peak[i], hideFirst ? 0 : Math.abs(first[i]));
  }
  return limit || 1;
}
