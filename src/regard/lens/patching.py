"""Activation patching: which activation carries the difference between two inputs?

    effect(name, i) = (m(corrupted, activation i from clean) - m(corrupted)) / (m(clean) - m(corrupted))

The model runs on the corrupted input, with one cell of one activation (a position, or a head) from the clean run. An
effect of 1 restores the metric of the clean run, and 0 changes nothing. Vig et al. 2020; Meng et al. 2022.

    metric = logit_difference(answer=17, wrong=4)
    result = activation_patching(model, clean, corrupted, metric)   # residual stream: layers × positions
    result.effects                                                  # {"stack.input": (L,), "stack.blocks.0": (L,) …}

The inputs of an encoder-decoder are pairs of source ids and ids.

Blocks before the patched one have the same outputs as in the corrupted run, so they are not computed again.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from regard.lens.hooks import patch, record
from regard.lens.inputs import Metric, ModelInputs, Rows, measure, residual_names, rows_of, stack_names

OnProgress = Callable[[int, int], None]  # activations done, and all
ROWS = 32  # cells per forward, which bounds memory
DIMENSIONS = {"position": -2, "head": 1}


@dataclass(frozen=True)
class Patching:
    effects: dict[str, Tensor]  # by activation: (L,), (H,), or () if the whole activation is patched
    clean: float  # the metric of each run
    corrupted: float

    @property
    def matrix(self) -> Tensor:
        """(activations, cells), if all activations have the same number of cells"""
        return torch.stack(list(self.effects.values()))


@torch.no_grad()
def activation_patching(
    model: nn.Module,
    clean: ModelInputs,
    corrupted: ModelInputs,
    metric: Metric,
    patterns: str | Sequence[str] | None = None,
    by: Literal["position", "head", "all"] = "position",
    progress: OnProgress | None = None,
) -> Patching:
    """The effect of every cell of the named activations, by default of the residual stream at every position.

    `clean` and `corrupted` are ids (L,) of the same length, or pairs of source ids and ids; `metric` maps logits
    (B, L, V) to (B,). by: "position" patches one position at a time (of scores and patterns one query), "head" one head
    at all positions, of activations (B, H, L, …), "all" a whole activation.
    """
    runs = run_both(model, clean, corrupted, metric, residual_names(model) if patterns is None else patterns)
    effects = {}
    for done, name in enumerate(runs.recorded):
        if progress is not None:
            progress(done, len(runs.recorded))
        effects[name] = runs.effect(patched_values(model, runs, name, metric, by))
    return Patching(effects, runs.clean, runs.corrupted)


class BothRuns(NamedTuple):
    rows: Rows  # the corrupted input, each (1, L)
    recorded: Mapping[str, Tensor]  # activations of the clean run
    clean: float  # the metric of each run
    corrupted: float
    blocks: Mapping[str, Tensor]  # outputs (1, L, D) of all blocks in the corrupted run

    def effect(self, values: Tensor) -> Tensor:
        return (values - self.corrupted) / (self.clean - self.corrupted)


def run_both(
    model: nn.Module,
    clean: ModelInputs,
    corrupted: ModelInputs,
    metric: Metric,
    patterns: str | Sequence[str],
) -> BothRuns:
    """Record the named activations of the clean run; ValueError for inputs of different lengths or the same metric."""
    first, second = rows_of(model, clean), rows_of(model, corrupted)
    for one, other in zip(first, second, strict=True):
        if one.shape != other.shape or len(one) != 1:
            shapes = f"{tuple(one.shape)} and {tuple(other.shape)}"
            raise ValueError(f"the ids have shapes {shapes}; give two sequences of the same length")
    with record(model, patterns) as recorded:
        clean_value = measure(model, first, metric).item()
    blocks = [name for name in residual_names(model) if ".blocks." in name] if stack_names(model) else []
    with record(model, blocks) as outputs:
        corrupted_value = measure(model, second, metric).item()
    if clean_value == corrupted_value:
        raise ValueError("the metric is the same for both inputs, so there is no difference to explain; choose others")
    return BothRuns(second, recorded, clean_value, corrupted_value, outputs)


def patched_values(model: nn.Module, runs: BothRuns, name: str, metric: Metric, by: str) -> Tensor:
    """The metric with each cell of the clean activation (1, …) patched into the corrupted run: (cells,) or ()"""
    clean = runs.recorded[name]
    if by == "all":
        with patch(model, {name: clean}), known_blocks(model, name, runs.blocks):
            return measure(model, runs.rows, metric)[0]
    values = []
    for cells, edit in cell_edits(name, clean, by):
        with patch(model, {name: edit}), known_blocks(model, name, runs.blocks):
            values.append(measure(model, repeated(runs.rows, cells), metric))
    return torch.cat(values)


class KnownBlock(nn.Module):
    """A block whose output (1, L, D) is known."""

    def __init__(self, output: Tensor):
        super().__init__()
        self.output = output

    def forward(self, x: Tensor, *_: object) -> tuple[Tensor, dict[str, Tensor]]:
        return self.output.expand_as(x), {}


@contextmanager
def known_blocks(model: nn.Module, name: str, outputs: Mapping[str, Tensor]) -> Generator[None]:
    """Do not compute the blocks before the one that has the module `name`; none if it is outside of all blocks."""
    patched, earlier = model.get_submodule(name), []
    for block in outputs:  # in the order of computation
        if any(module is patched for module in model.get_submodule(block).modules()):
            break
        earlier.append(block)
    else:
        earlier = []
    originals = {block: model.get_submodule(block) for block in earlier}
    try:
        for block in earlier:
            model.set_submodule(block, KnownBlock(outputs[block]))
        yield
    finally:
        for block, module in originals.items():
            model.set_submodule(block, module)


def repeated(rows: Rows, count: int) -> Rows:
    return tuple(ids.expand(count, -1) for ids in rows)


def cell_edits(name: str, clean: Tensor, by: str) -> Iterator[tuple[int, Callable[[Tensor], Tensor]]]:
    """Groups of at most ROWS cells: their number, and a function that replaces one cell in each row of a batch."""
    dim = DIMENSIONS[by]
    if by == "head" and clean.dim() != 4:
        raise ValueError(f"{name} has shape {tuple(clean.shape)}, without heads; choose names such as '*.body.z'")
    for cells in torch.arange(clean.shape[dim], device=clean.device).split(ROWS):
        yield len(cells), cell_edit(clean, cells, dim)


def cell_edit(clean: Tensor, cells: Tensor, dim: int = DIMENSIONS["position"]) -> Callable[[Tensor], Tensor]:
    """A function that gives row b of a batch cell cells[b] of the clean activation (1, …)."""
    index = torch.arange(clean.shape[dim], device=clean.device)

    def edit(x: Tensor) -> Tensor:
        shape = [1] * x.dim()
        shape[0], shape[dim] = len(cells), len(index)
        return torch.where((index == cells.unsqueeze(1)).view(shape), clean, x)

    return edit
