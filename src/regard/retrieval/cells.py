"""Cells: a division of vectors of length 1 into groups of similar ones, by spherical k-means (Dhillon & Modha 2001).

cell(v) = argmax_c v · centre_c        centre_c = Σ v / |Σ v| over the vectors v of cell c
"""

import numpy as np

ROUNDS = 8
BATCH = 4096  # vectors that are compared with all centres at once


def learn_centres(vectors: np.ndarray, count: int, seed: int = 0) -> np.ndarray:
    """(count, D) centres of vectors (N, D), N >= count."""
    rng = np.random.default_rng(seed)
    centres = vectors[rng.choice(len(vectors), count, replace=False)]
    for _ in range(ROUNDS):
        cells = nearest_centres(vectors, centres)
        sums = np.zeros_like(centres)
        np.add.at(sums, cells, vectors)
        lengths = np.linalg.norm(sums, axis=1, keepdims=True)
        empty = lengths[:, 0] < 1e-6
        centres = np.where(empty[:, None], vectors[rng.choice(len(vectors), count)], sums / np.maximum(lengths, 1e-6))
    return centres


def nearest_centres(vectors: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """(N,) the index of the centre with the largest cosine to each vector."""
    parts = [(vectors[i : i + BATCH] @ centres.T).argmax(1) for i in range(0, len(vectors), BATCH)]
    return np.concatenate([np.zeros(0, np.int64), *parts])
