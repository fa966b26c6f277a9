"""The residual stream of one sequence, recorded once, with norms, large activations and the logit lens on demand.

    recorded = RecordedResidual(model, ids)     # one forward; keeps the stream at the input and after every block
    recorded.norms()                            # (layers + 1, L)
    recorded.predictions(3)                     # the logit lens after three blocks

Logits are computed for a few positions at a time: those of all layers and positions are (layers + 1) · L · V numbers.

Of an encoder-decoder the stream of one side is kept: RecordedResidual(model, (source, ids), "target").
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.lens.hooks import record
from regard.lens.inputs import ModelInputs, residual_names, rows_of
from regard.lens.logit_lens import unembed
from regard.lens.residual_stream import LargeActivation, largest_activations

CHUNK = 1 << 24  # logits at a time


class LayerPredictions(NamedTuple):
    """What the head predicts from the residual stream at one depth, for P positions."""

    top: Tensor  # (P, k) ids of the most probable tokens
    probabilities: Tensor  # (P, k)
    final: Tensor  # (P,) probability of the token that the model predicts after its last layer
    rank: Tensor  # (P,) of that token, 0 for the most probable one
    entropy: Tensor  # (P,) in nats


class RecordedResidual:
    @torch.no_grad()
    def __init__(self, model: nn.Module, inputs: ModelInputs, side: str = ""):
        """side: "source" or "target" of an encoder-decoder."""
        rows, prefix = rows_of(model, inputs), f"{side}.stack." if side else "stack."
        self.names = [name for name in residual_names(model) if name.startswith(prefix)]
        with record(model, self.names) as recorded:
            model(*rows)
        self.streams = [recorded[name][0] for name in self.names]  # each (L, D)
        self.ids, self.reader = rows[0] if side == "source" else rows[-1], model.get_submodule(side)
        self._predicted = torch.full_like(self.ids[0], -1)  # ids; -1: not computed yet

    def norms(self) -> Tensor:
        """(layers + 1, L): the Euclidean norm of the stream at the input of the stack and after each block."""
        return torch.stack([x.float().norm(dim=-1) for x in self.streams])

    def largest(self, count: int = 12) -> list[LargeActivation]:
        """The activations that are largest relative to the median size of their layer.

        A channel of a position is listed once, at the layer where it is largest: later layers carry it on.
        """
        found: dict[tuple[int, int], LargeActivation] = {}
        for name, x in zip(self.names, self.streams, strict=True):
            for one in largest_activations(name, x.unsqueeze(0).float(), count):
                known = found.get((one.position, one.channel))
                if known is None or known.ratio < one.ratio:
                    found[one.position, one.channel] = one
        return sorted(found.values(), key=lambda activation: -activation.ratio)[:count]

    @torch.no_grad()
    def predictions(self, depth: int, positions: slice = slice(None), top: int = 5) -> LayerPredictions:
        """The logit lens after `depth` blocks; ValueError for a model without a head for tokens."""
        index = torch.arange(self.ids.shape[1], device=self.ids.device)[positions]
        first = self._log_probabilities(depth, index[:1])
        parts = [self._predict(depth, part, top) for part in index.split(max(1, CHUNK // first.shape[-1]))]
        return LayerPredictions(*map(torch.cat, zip(*parts, strict=True)))

    def _predict(self, depth: int, positions: Tensor, top: int) -> LayerPredictions:
        if (self._predicted[positions] < 0).any():
            self._predicted[positions] = self._log_probabilities(-1, positions).argmax(-1)
        logp = self._log_probabilities(depth, positions)  # (P, V)
        best = logp.topk(min(top, logp.shape[-1]))
        final = logp.gather(-1, self._predicted[positions].unsqueeze(-1))  # (P, 1)
        entropy = torch.special.entr(logp.exp()).sum(-1)
        rank = (logp > final).sum(-1)
        return LayerPredictions(best.indices, best.values.exp(), final[:, 0].exp(), rank, entropy)

    def _log_probabilities(self, depth: int, positions: Tensor) -> Tensor:
        x = self.streams[depth][positions].unsqueeze(0)
        return unembed(self.reader, x, self.ids[:, positions])[0].float().log_softmax(-1)  # (P, V)
