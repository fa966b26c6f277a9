// Kinds of parts and layers as text.

export const exact = (value) => value.toLocaleString("en");

export const kindTitle = (kind) => kind.replaceAll("_", " ");
export const layerTitle = (depth) => (depth === 0 ? "input" : `block ${depth - 1}`);
