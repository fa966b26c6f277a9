"""Packing: sequences of any length in rows of one length, each attending only to itself.

An item is a mapping of arrays of one length, such as `tokens`, `targets` and `weights`. A row holds several items, each
a segment with positions from 0; the rest of the row is padding, with segment -1 and weight 0.

Rows are filled best-fit: first the oldest pending item, then repeatedly the longest one that fits.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from regard.data.batch import Batch

PADDING_SEGMENT = -1
Item = Mapping[str, np.ndarray]  # the arrays of one sequence, or of one example of a batch


def item_length(item: Item) -> int:
    return len(item["tokens"])


def best_fit(lengths: Sequence[int], capacity: int) -> list[int]:
    """The indices of the items that fill a row: the oldest, then the longest that fit; `lengths` is oldest first."""
    indices = [0]
    remaining = capacity - lengths[0]
    for index in sorted(range(1, len(lengths)), key=lambda index: -lengths[index]):  # stable: ties keep their order
        if lengths[index] <= remaining:
            indices.append(index)
            remaining -= lengths[index]
    return indices


def pack(rows: Sequence[Sequence[Item]], length: int, pad: int = 0) -> Batch:
    """A batch of (B, L) tensors: the arrays of the items, and their `positions` and `segments`."""
    names = [*rows[0][0], "positions", "segments"]
    arrays = {
        name: np.full((len(rows), length), padding_value(name, pad), np.float32 if name == "weights" else np.int64)
        for name in names
    }
    for row, items in enumerate(rows):
        start = 0
        for segment, item in enumerate(items):
            end = start + item_length(item)
            for name, array in item.items():
                arrays[name][row, start:end] = array
            arrays["positions"][row, start:end] = np.arange(end - start)
            arrays["segments"][row, start:end] = segment
            start = end
    return Batch(**{name: torch.from_numpy(array) for name, array in arrays.items()})


def padding_value(name: str, pad: int) -> int:
    return {"tokens": pad, "targets": pad, "segments": PADDING_SEGMENT}.get(name, 0)


def pad_items(items: Sequence[Item], name: str, pad: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """One array of all items, padded on the right to the longest (B, L), and False for padding (B, L)."""
    lengths = np.array([len(item[name]) for item in items])
    dtype = np.float32 if items[0][name].dtype.kind == "f" else np.int64
    padded = np.full((len(items), max(1, lengths.max())), pad, dtype)
    for row, item in enumerate(items):
        padded[row, : lengths[row]] = item[name]
    return torch.from_numpy(padded), torch.from_numpy(np.arange(padded.shape[1]) < lengths[:, None])
