"""Memory of training: bytes per parameter, adapters, and the activations that backward needs.

full, float32     4 weights + 4 gradients + 8 moments of AdamW                     = 16
full, mixed       2 weights + 2 gradients + 4 float32 copy + 8 moments             = 16    (inference: 2)
LoRA              the frozen base in its format, and 16 per parameter of the adapters; r·(in + out) for a linear layer
QLoRA             the same with the base in 4 bits        Dettmers et al. 2023

An adapter can store about 2 bits per parameter (Allen-Zhu & Li 2024), and reinforcement learning provides about one bit
per episode, so a small adapter suffices for it (Schulman et al. 2025, "LoRA without regret").
"""

from collections.abc import Iterable
from math import log, prod

import torch
from torch import Tensor

from regard.adapt.targets import ALL_LINEAR, select_weights
from regard.kernels.attention.arguments import ScoreOptions
from regard.layout import TokenLayout
from regard.models.base import Model, build_on_meta, meta_device
from regard.models.decoder import Decoder, DecoderModule
from regard.planning.memory import format_of

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FEEDFORWARD = ("gate_proj", "up_proj", "down_proj")
BITS_PER_PARAMETER = 2


def full_training_bytes(parameters: int, mixed: bool = False) -> dict[str, int]:
    if mixed:
        copies = {"weights": 2, "gradients": 2, "float32 copy": 4, "moments": 8}
    else:
        copies = {"weights": 4, "gradients": 4, "moments": 8}
    return {name: size * parameters for name, size in copies.items()}


def lora_training_bytes(parameters: int, adapters: int, base: str = "bfloat16") -> dict[str, int]:
    """`base` is the format of the frozen weights: "nf4" for QLoRA."""
    return {"frozen base": format_of(base).bytes(parameters)} | {
        f"adapters' {name}": size for name, size in full_training_bytes(adapters).items()
    }


def lora_parameters(spec: Model, rank: int, targets: Iterable[str] = ALL_LINEAR, dora: bool = False) -> int:
    """Parameters of an adapter: one pair of matrices per weight and per expert; tied weights share one pair.

    dora: with one magnitude per output.
    """
    return sum(
        prod(stack) * (adapter_parameters(rank, inputs, outputs) + (outputs if dora else 0))
        for *stack, outputs, inputs in adapted_shapes(spec, targets).values()
    )


def adapter_parameters(rank: int, inputs: int, outputs: int) -> int:
    return rank * (inputs + outputs)


def adapted_shapes(spec: Model, targets: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """The shape (…, out, in) of every weight that the targets select."""
    weights = select_weights(build_on_meta(spec), (targets,) if isinstance(targets, str) else tuple(targets))
    return {name: tuple(weight.weight.shape) for name, weight in weights.items()}


def episode_bits(problems: int, samples: int, bits: float = 1.0) -> float:
    """An upper bound on the bits that reinforcement learning provides: `bits` of reward per sample of each problem."""
    return problems * samples * bits


def supervised_bits(tokens: int, loss: float) -> float:
    """An upper bound on the bits that supervised learning provides: the loss of the untrained model, in nats per token.

    So many bits describe the tokens, given the model's predictions. What the model predicts teaches it nothing.
    """
    return tokens * loss / log(2)


def activation_bytes(spec: Model, batch: int, tokens: int) -> int:
    """Bytes that a forward and its loss keep for backward, in float32 and without recomputation.

    The modules run on the meta device and their saved tensors are counted. Attention is assumed to be tiled: it keeps
    its inputs, its output and one number per query, never the scores. The loss keeps the gradient of the hidden states;
    its logits are computed in chunks.
    """
    if not isinstance(spec, Decoder):
        raise ValueError(f"activations are counted for decoders, not for kind {spec.kind!r}; plan without them")
    model = build_on_meta(spec)
    for module in model.modules():
        if "attend" in vars(module):
            vars(module)["attend"] = tiled_attention
    with meta_device():
        return saved_bytes(model, torch.zeros(batch, tokens, dtype=torch.long))


def saved_bytes(model: DecoderModule, ids: Tensor) -> int:
    """Bytes that autograd saves in next-token training on these ids, without the weights; each storage once."""
    storages: dict[int, torch.UntypedStorage] = {}

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        hidden = model.hidden(ids)  # (B, L, D)
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    return hidden.nbytes + sum(storage.nbytes() for key, storage in storages.items() if key not in weights)


class TiledAttentionMemory(torch.autograd.Function):
    """Saves the tensors that a tiled kernel saves for backward, without computing them."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, heads, length, _ = q.shape
        out = torch.empty(batch, length, heads, v.shape[-1], dtype=q.dtype).transpose(1, 2)  # (B, H, L, Ev)
        logsumexp = torch.empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, logsumexp)
        return out


def tiled_attention(q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, scores: ScoreOptions) -> Tensor:
    return TiledAttentionMemory.apply(q, k, v)
