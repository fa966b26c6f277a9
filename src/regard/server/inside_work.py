"""What /regard/spec, /regard/lens and /regard/patch compute: functions that run in the thread of the lens.

They use a copy of the modules that shares the weights, so no hooks run in the engine's modules.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.lens.hooks import patch
from regard.lens.inputs import (
    Metric,
    ModelInputs,
    check_predicts_next,
    is_encoder_decoder,
    part_for_text,
    residual_names,
    rows_of,
)
from regard.lens.patching import BothRuns, cell_edit, patched_values, run_both
from regard.lens.recorded_attention import copy_with_shared_tensors
from regard.lens.recorded_residual import RecordedResidual
from regard.lens.symbolic_shapes import symbolic_shapes
from regard.planning.part_tree import part_tree
from regard.server.json_numbers import rounded
from regard.server.served_model import Inspected, ServedModel
from regard.text.tokenizer import Tokenizer


class Candidate(NamedTuple):
    id: int
    text: str
    probability: float


def draw(served: ServedModel, model: Inspected, length: int) -> dict[str, Any]:
    """The tree of parts (planning/part_tree.py) with their sources, and the shapes of all activations."""
    module: Any = model.module
    dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
    if served.shapes is None:
        served.shapes = activation_shapes(module)
    return part_tree(module.spec, length, dtype) | {"shapes": served.shapes}


def activation_shapes(module: Any) -> dict[str, list[str | int]]:
    """Shapes by name; none for a model that reads no ids."""
    try:
        part = part_for_text(module)
    except ValueError:
        return {}
    return symbolic_shapes(copy_with_shared_tensors(part))


def record_residual(model: Inspected, ids: Sequence[int], source: Sequence[int] | None) -> RecordedResidual:
    """source: of an encoder-decoder, whose decoder reads the ids; without one its encoder reads them."""
    module = part_for_text(model.module)
    if source is not None:
        return RecordedResidual(copy_with_shared_tensors(module), (source, ids), "target")
    reader = module.get_submodule("source") if is_encoder_decoder(module) else module
    return RecordedResidual(copy_with_shared_tensors(reader), ids)


def overview(recorded: RecordedResidual) -> dict[str, Any]:
    largest = [
        {
            "layer": recorded.names.index(one.name),
            "position": one.position,
            "channel": one.channel,
            "value": one.value,
            "ratio": one.ratio,
            "massive": one.massive,
        }
        for one in recorded.largest()
    ]
    return rounded({"norms": recorded.norms(), "largest": largest}, 4)


def layer_predictions(
    recorded: RecordedResidual, tokenizer: Tokenizer, depth: int, positions: slice, top: int
) -> dict[str, Any]:
    found = recorded.predictions(depth, positions, top)
    return {
        "depth": depth,
        "top": [[c.text for c in row] for row in candidates(tokenizer, found.top, found.probabilities)],
        "probabilities": rounded(found.probabilities, 5),
        "final": rounded(found.final, 5),
        "rank": found.rank.tolist(),
        "entropy": rounded(found.entropy, 4),
    }


class PromptPair:
    """A model and two prompts of one length. Its methods are parts of one request."""

    def __init__(self, model: Inspected, tokenizer: Tokenizer, clean: list[int], corrupted: list[int]):
        self.model, self.tokenizer = copy_with_shared_tensors(part_for_text(model.module)), tokenizer
        check_predicts_next(self.model)
        source = is_encoder_decoder(self.model)  # of which the prompts are sources, and the output has only its start
        start = [] if model.start is None else [model.start]
        self.clean, self.corrupted = ((ids, start) if source else ids for ids in (clean, corrupted))
        self.names = [name for name in residual_names(self.model) if not source or name.startswith("source.")]

    @torch.no_grad()
    def next_tokens(self, inputs: ModelInputs, top: int) -> list[Candidate]:
        probabilities = self.model(*rows_of(self.model, inputs))[0, -1].float().softmax(-1)
        best = probabilities.topk(min(top, len(probabilities)))
        return candidates(self.tokenizer, best.indices[None], best.values[None])[0]

    @torch.no_grad()
    def run_both(self, metric: Metric) -> BothRuns:
        return run_both(self.model, self.clean, self.corrupted, metric, self.names)

    @torch.no_grad()
    def effects(self, runs: BothRuns, name: str, metric: Metric) -> list[float]:
        """The effect of each position of one activation."""
        values = patched_values(self.model, runs, name, metric, "position")
        return rounded(runs.effect(values), 4)

    def patched_tokens(self, runs: BothRuns, layer: int, position: int, top: int) -> list[Candidate]:
        """The next tokens after the corrupted prompt, with one cell of the clean run."""
        name = self.names[layer]
        edit = cell_edit(runs.recorded[name], torch.tensor([position], device=runs.rows[0].device))
        with patch(self.model, {name: edit}):
            return self.next_tokens(self.corrupted, top)


def candidates(tokenizer: Tokenizer, ids: Tensor, probabilities: Tensor) -> list[list[Candidate]]:
    """ids, probabilities: (P, k)"""
    return [
        [Candidate(id, tokenizer.decode_token(id), p) for id, p in zip(row, values, strict=True)]
        for row, values in zip(ids.tolist(), probabilities.tolist(), strict=True)
    ]
