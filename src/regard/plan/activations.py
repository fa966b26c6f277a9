"""What a training forward keeps for its backward: the same modules, run without memory, their saved tensors counted.

Attention is taken to be tiled: it keeps its inputs, its output and one number a row, never the scores. The loss keeps
what it gives back to the last vectors; its logits come and go in chunks. Nothing is recomputed, and everything is in
float32.
"""

import torch
from torch import Tensor

from regard.kernels.attention.score_options import ScoreOptions
from regard.layout import TokenLayout
from regard.models.decoder import Decoder, DecoderModule
from regard.models.meta_device import build_on_meta, meta_device
from regard.plan.parts import Planned


def activation_bytes(spec: Planned, batch: int, tokens: int) -> int:
    """Bytes of one forward and its loss."""
    if not isinstance(spec, Decoder):
        raise ValueError(
            f"activations are counted for decoders, and this is of kind {spec.kind!r}; plan it without them"
        )
    model = build_on_meta(spec)
    for module in model.modules():
        if "attend" in vars(module):
            vars(module)["attend"] = tiled
    with meta_device():
        return kept_bytes(model, torch.zeros(batch, tokens, dtype=torch.long))


def kept_bytes(model: DecoderModule, ids: Tensor) -> int:
    """Bytes that autograd keeps of next-token training on these ids, weights aside; each storage once."""
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model.hidden(ids)  # (B, L, D)
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    return hidden.nbytes + sum(storage.nbytes() for key, storage in kept.items() if key not in weights)


class TiledActivations(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, heads, length, _ = q.shape
        out = torch.empty(batch, length, heads, v.shape[-1], dtype=q.dtype).transpose(1, 2)  # (B, H, L, Ev)
        rows = torch.empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, rows)
        return out


def tiled(q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, scores: ScoreOptions) -> Tensor:
    return TiledActivations.apply(q, k, v)
