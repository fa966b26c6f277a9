"""The shapes of all activations in terms of the batch B and the length L.

    symbolic_shapes(model)["stack.input"]                             # ["B", "L", 64]
    symbolic_shapes(model)["stack.blocks.0.sublayers.0.body.q"]       # ["B", 4, "L", 16]

The rows of a mixture of experts are tokens, each as often as it is routed: ["2·B·L", 12] for two experts per token.
A forward for each of three inputs tells what a size depends on: the second has more rows, the third is longer.
"""

import torch
from torch import nn

from regard.lens.hooks import shapes
from regard.lens.inputs import is_encoder_decoder, rows_of

BATCH, LENGTH = 2, 8
MORE_ROWS, LONGER = 3, 12


def symbolic_shapes(model: nn.Module) -> dict[str, list[str | int]]:
    """By name, of a model that reads ids; both sequences of an encoder-decoder have the length L."""
    base, wide, long = (
        shapes_for(model, batch, length) for batch, length in ((BATCH, LENGTH), (MORE_ROWS, LENGTH), (BATCH, LONGER))
    )
    return {
        name: [symbol(*sizes) for sizes in zip(shape, wide[name], long[name], strict=True)]
        for name, shape in base.items()
    }


def shapes_for(model: nn.Module, batch: int, length: int) -> dict[str, tuple[int, ...]]:
    ids = torch.zeros(batch, length, dtype=torch.long)
    return shapes(model, *rows_of(model, (ids, ids) if is_encoder_decoder(model) else ids))


def symbol(base: int, wide: int, long: int) -> str | int:
    """The size as a number, or as a multiple of B, L or B·L; "…" if it is none."""
    if base == wide == long:
        return base
    name = "B" if base == long else "L" if base == wide else "B·L"
    rows, length = "B" in name, "L" in name
    unit = (BATCH if rows else 1) * (LENGTH if length else 1)
    factor, rest = divmod(base, unit)
    expected = (
        (factor * unit * MORE_ROWS // BATCH if rows else base),
        (factor * unit * LONGER // LENGTH if length else base),
    )
    if rest or (wide, long) != expected:
        return "…"
    return name if factor == 1 else f"{factor}·{name}"
