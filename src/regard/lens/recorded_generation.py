"""Record the activations of one request while an engine decodes it, beside other requests.

    found = record_generation(llm.engine, llm.encode("Anna is"), Sampling(max_new=8), "*.pattern")
    found.tokens                                           # the new ids
    found["stack.blocks.0.sublayers.0.body.pattern"]       # (H, T, T): prompt and new tokens, but the last

The fast copies of a model that an engine decodes with (compiled, CUDA graphs) call no hooks. So forwards run on the
model itself meanwhile. In every forward the rows of other requests are left out; their tokens do not change, up to
rounding. The cache of prefixes is not used, so the whole prompt is computed.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from regard.lens.hooks import hooked, names
from regard.lens.recorded import Recorded
from regard.parts.tap import Tap

WIDE = ("scores", "pattern")  # (B, H, L, S)
KEYS = ("k", "v")  # (B, K, S, E) of softmax attention: of all cached tokens


class ObservedRunner(Protocol):
    @property
    def plain(self) -> Any: ...

    def observed(self, observe: Callable[[Any], None], /) -> AbstractContextManager[None]: ...


class DecodingEngine(Protocol):
    """What is used of regard.engine.Engine, which this package does not import."""

    @property
    def model(self) -> Any: ...

    @property
    def runner(self) -> ObservedRunner: ...

    def submit(self, ids: Sequence[int], sampling: Any, /) -> Any: ...

    def step(self) -> Any: ...

    def cancel(self, request: Any, /) -> None: ...


class RecordedGeneration(Recorded):
    """Activations by name, without the batch dimension: one row per token of the prompt and of `tokens` but the last,
    which the model has not read. Patterns and scores are (H, T, T)."""

    tokens: list[int]


@dataclass(frozen=True)
class RecordedChunk:
    """What one forward has computed for the request: of its tokens from `start` on, with `end` keys."""

    start: int
    end: int
    x: Tensor


def record_generation(
    engine: DecodingEngine, ids: Sequence[int], sampling: Any, patterns: str | Sequence[str]
) -> RecordedGeneration:
    """Generate for `ids` with an engine, and keep the activations whose names match one of the patterns, on the CPU.

    sampling: a regard.engine.request.Sampling. Other requests of the engine run too. The names are those of the
    decoder, `engine.model`; experts' neurons cannot be recorded, since their rows are sorted by expert. Raises
    ValueError if no activation was recorded.
    """
    if engine.runner.plain is not engine.model:
        raise ValueError("batch_invariant decodes with fused modules that have no hooks; open an engine without it")
    patterns = [patterns] if isinstance(patterns, str) else patterns
    found = dict.fromkeys(name for pattern in patterns for name in names(engine.model, pattern))
    chunks: dict[str, list[RecordedChunk]] = {}
    request = engine.submit(ids, sampling)
    place: list[tuple[int, int, int, int]] = []  # row, start, length of the request in this forward; rows of all

    def observe(batch: Any) -> None:
        place[:] = [
            (row, other.cached, length, len(batch)) for row, (other, length) in enumerate(batch) if other is request
        ]

    def keep(name: str, output: Tensor) -> None:
        if not place:
            return  # the forward is of other requests
        row, start, length, rows = place[0]
        if len(output) != rows:
            if name in patterns:
                raise ValueError(f"{name} has shape {tuple(output.shape)}, without a row per request; leave it out")
            return
        x = own_tokens(engine.model, name, output[row], length, start + length)
        earlier = [chunk for chunk in chunks.get(name, []) if chunk.start < start]  # a preempted request starts again
        chunks[name] = [*earlier, RecordedChunk(start, start + length, x.detach().to("cpu", copy=True))]

    try:
        with hooked(engine.model, [(name, keep) for name in found], patterns), engine.runner.observed(observe):
            while request.finish is None:
                engine.step()
    finally:
        engine.cancel(request)
    if request.error is not None:
        raise ValueError(f"the request failed: {request.error}")
    if not chunks:
        tried = ", ".join(patterns)
        raise ValueError(f"no activation that matches {tried} has a row per request; choose other patterns")
    # On a GPU the step after the last token has started before that token is read.
    end = len(ids) + len(request.new) - 1
    read = {name: [chunk for chunk in parts if chunk.start < end] for name, parts in chunks.items()}
    result = RecordedGeneration({name: joined(engine.model, name, parts) for name, parts in read.items()})
    result.tokens = [token.id for token in request.new]
    return result


def own_tokens(model: nn.Module, name: str, x: Tensor, length: int, keys: int) -> Tensor:
    """A row of an activation without padding: its first `length` tokens, or `keys` cached ones."""
    kind = kind_of(model, name)
    if kind in WIDE:
        return x[..., :length, :keys]
    return x[..., : keys if kind in KEYS else length, :]


def joined(model: nn.Module, name: str, chunks: list[RecordedChunk]) -> Tensor:
    """The chunks of all forwards as one tensor."""
    kind = kind_of(model, name)
    if kind in KEYS:
        return chunks[-1].x
    if kind in WIDE:
        keys, fill = chunks[-1].end, -torch.inf if kind == "scores" else 0.0
        rows = [nn.functional.pad(chunk.x, (0, keys - chunk.x.shape[-1]), value=fill) for chunk in chunks]
        return torch.cat(rows, -2)
    return torch.cat([chunk.x for chunk in chunks], -2)


def kind_of(model: nn.Module, name: str) -> str:
    """The name of a tap of softmax attention, which has the keys of all cached tokens; else ""."""
    parent, _, tap = name.rpartition(".")
    softmax = isinstance(getattr(model.get_submodule(parent), "pattern", None), Tap)
    return tap if softmax else ""
