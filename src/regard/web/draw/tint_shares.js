// How strongly words are tinted by the weights of a row of an attention map.

const LEAST = 0.004; // a weight that is tinted

// 0 to 1 for each weight: its absolute value relative to the largest one. Weights of implied matrices may be negative.
export function tintShares(weights) {
  let largest = LEAST;
  for (const weight of weights) largest = Math.max(largest, Math.abs(weight));
  return weights.map((weight) => (Math.abs(weight) < LEAST ? 0 : Math.abs(weight) / largest));
}
