// Which tokens of the passage are the rows (queries) and columns (keys) of a layer's map.

// The tokens of the axes, and the index in the passage of their first ones. In an encoder-decoder the passage is the
// source and then the output; the input of its decoder is a start token and then the output.
export function axesOf(model, passage, layer) {
  const stack = model.attention_layers[layer].stack;
  const { tokens, generated } = passage;
  if (stack === "layers") return { rows: tokens, columns: tokens, firstRow: 0, firstColumn: 0 };
  const [source, output] = [tokens.slice(0, generated), ["⟨start⟩", ...tokens.slice(generated)]];
  const first = generated - 1; // the start token has the place of the source's last one
  if (stack === "encoder") return { rows: source, columns: source, firstRow: 0, firstColumn: 0 };
  if (stack === "cross") return { rows: output, columns: source, firstRow: first, firstColumn: 0 };
  return { rows: output, columns: output, firstRow: first, firstColumn: first };
}

export const hasSource = (model) => model.attention_layers.some(({ stack }) => stack === "cross");

// What the server needs to run the model on the passage.
export function sequenceOf(model, { ids, generated }) {
  if (!hasSource(model)) return { model: model.name, ids };
  return { model: model.name, ids: ids.slice(0, generated), target: ids.slice(generated) };
}

// The weights of the keys at their places in the passage.
export function placeInPassage(weights, axes, length) {
  if (axes.firstColumn === 0 && weights.length === length) return weights;
  const placed = new Float32Array(length);
  placed.set(weights.subarray(0, length - axes.firstColumn), axes.firstColumn);
  return placed;
}

const STACKS = {
  layers: "Layer",
  encoder: "Encoder layer",
  decoder: "Decoder layer",
  cross: "Cross-attention of layer",
};
const SHORT = { layers: "", encoder: "E", decoder: "D", cross: "C" };

export const layerName = ({ stack, index }) => `${STACKS[stack]} ${index}`;
export const shortLayerName = ({ stack, index }) => `${SHORT[stack]}${index}`;

export const isImplied = ({ mixers }) => mixers.some(({ implied }) => implied);
