"""Self-speculation by early exit: the first layers of the model, with its norm and its head, are the draft model.

    d ~ head(norm(block_m(… block_1(x))))       m of n layers: a draft token costs about m / n of a decode step

No weights are added, but the first layers have their keys and values in a second store. It pays for models whose early
layers predict well, such as those that were trained with early exits. Zhang et al. 2023 (Draft & Verify), Elhoushi et
al. 2024 (LayerSkip).
"""

from collections.abc import Sequence
from dataclasses import replace

from regard.engine.request import Draft, Request
from regard.engine.speculation.draft_model import DraftModel
from regard.models.base import build_on_meta
from regard.models.decoder import DecoderModule
from regard.models.stack import Repeat, unroll
from regard.parts.state import PerSource, declarations


class FirstLayers:
    def __init__(self, layers: int, memory: float | None = None):
        """memory: of their store, as for the engine."""
        self.layers, self.memory = layers, memory

    def open(self, target: DecoderModule, rows: int, capacity: int) -> None:
        self.draft_model = DraftModel(first_layers(target, self.layers), memory=self.memory)
        self.draft_model.open(target, rows, capacity)

    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[Draft]:
        return self.draft_model.propose(requests, lengths)


def first_layers(model: DecoderModule, layers: int) -> DecoderModule:
    """A decoder of the first layers, with the weights of the whole one. ValueError if it has no more than these."""
    spec = model.spec
    blocks = unroll(spec.layers)
    if any(isinstance(memory, PerSource) for block in spec.memory() for body in block for memory in declarations(body)):
        raise ValueError(f"self:{layers}: layers with cross-attention cannot draft alone; choose ngram or lookahead")
    if not 0 < layers < len(blocks):
        remedy = f"choose from 1 to {len(blocks) - 1} of them" if len(blocks) > 1 else "choose another method"
        raise ValueError(f"self:{layers}: the model has {len(blocks)} layer(s), and drafts need fewer; {remedy}")
    part = build_on_meta(replace(spec, layers=tuple(Repeat((block,)) for block in blocks[:layers]), ahead=()))
    for name, module in model.named_children():
        if name not in ("stack", "ahead"):
            setattr(part, name, module)
    part.stack.blocks = model.stack.blocks[:layers]
    return part.eval()
