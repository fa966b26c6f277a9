"""Sums over the inputs x of linear layers, from which all methods choose scales and codes.

    H = Σ x xᵀ        error = Σ ‖(W - W') x‖² = tr (W - W') H (W - W')ᵀ        mean |x|, max |x| per input

Their size does not depend on the number of tokens. Layers that read the same tensor (queries, keys and values) share
one object.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from regard.kernels.grouped_matmul import expert_rows
from regard.parts.experts import GroupedLinear


class InputStatistics:
    def __init__(self, inputs: int, dtype: torch.dtype, device: torch.device):
        self.products = torch.zeros(inputs, inputs, dtype=dtype, device=device)  # H
        self.magnitudes = torch.zeros(inputs, dtype=dtype, device=device)  # Σ |x|
        self.largest = torch.zeros(inputs, dtype=dtype, device=device)  # max |x|
        self.count = 0

    def add(self, x: Tensor) -> None:
        """x (tokens, inputs)"""
        x = x.to(self.products.dtype)
        self.products += x.t() @ x
        self.magnitudes += x.abs().sum(0)
        if len(x):
            self.largest = torch.maximum(self.largest, x.abs().amax(0))
        self.count += len(x)

    @property
    def mean_magnitude(self) -> Tensor:
        return self.magnitudes / max(1, self.count)

    def divided_by(self, scales: Tensor) -> "InputStatistics":
        """The statistics of x / scales."""
        result = InputStatistics(len(scales), self.products.dtype, self.products.device)
        result.products = self.products / scales.unsqueeze(1) / scales
        result.magnitudes, result.largest = self.magnitudes / scales, self.largest / scales
        result.count = self.count
        return result

    def output_error(self, difference: Tensor) -> Tensor:
        """Σ ‖D x‖² for a matrix D (outputs, inputs)."""
        difference = difference.to(self.products.dtype)
        return ((difference @ self.products) * difference).sum()

    def relative_error(self, difference: Tensor, weight: Tensor) -> float:
        """√(Σ ‖D x‖² / Σ ‖W x‖²)"""
        error, size = self.output_error(difference), self.output_error(weight)
        return float((error.clamp_min(0) / size.clamp_min(torch.finfo(size.dtype).tiny)).sqrt())


@contextmanager
def record_inputs(
    layers: Mapping[str, nn.Linear | GroupedLinear], valid: Tensor | None = None
) -> Generator[dict[str, Tensor]]:
    """Record the inputs (tokens, inputs) of the layers in one forward, without those of padding.

    Layers that read the same tensor get the same object. The matrices of experts get the rows of their own tokens,
    under the names NAME.0, NAME.1 …; a padded token counts for the experts that it is routed to.
    """
    found: dict[str, Tensor] = {}
    slices: dict[int, tuple[Tensor, list[Tensor]]] = {}
    flattened: dict[int, tuple[Tensor, Tensor]] = {}  # by id, with the original, so that its id is not used again

    def keep(name: str, x: Tensor) -> None:
        if id(x) not in flattened:
            padded = valid is not None and x.shape[:-1] == valid.shape
            flattened[id(x)] = x, x[valid] if padded else x.reshape(-1, x.shape[-1])
        found[name] = flattened[id(x)][1]

    def keep_rows(name: str, x: Tensor, ends: Tensor) -> None:
        if id(x) not in slices:
            slices[id(x)] = x, [x[rows] for rows in expert_rows(ends)]
        found.update({f"{name}.{expert}": rows for expert, rows in enumerate(slices[id(x)][1])})

    def record(name: str, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        if isinstance(layer, GroupedLinear):
            keep_rows(name, args[0], args[1])
        else:
            keep(name, args[0])

    handles = [
        layer.register_forward_pre_hook(lambda module, args, name=name: record(name, module, args))
        for name, layer in layers.items()
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def add_inputs(statistics: dict[str, InputStatistics], inputs: Mapping[str, Tensor]) -> None:
    """Add the recorded inputs of one forward; layers of one input share their statistics from the first forward on."""
    added: dict[int, InputStatistics] = {}
    for name, x in inputs.items():
        if id(x) in added:
            statistics[name] = added[id(x)]
            continue
        if name not in statistics:
            dtype = torch.promote_types(x.dtype, torch.float32)
            statistics[name] = InputStatistics(x.shape[-1], dtype, x.device)
        statistics[name].add(x)
        added[id(x)] = statistics[name]
