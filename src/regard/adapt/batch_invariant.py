"""Batch-invariant sublayers on a GPU: the output for a token is bitwise the same whatever is computed beside it.

It does not depend on the other requests of a batch, on the chunks of a prompt, on a cached prefix, or on whether the
token was decoded or recomputed in a prompt. Every matrix product, norm and attention is computed by kernels that add
the numbers of a token in one order (kernels/triton_invariant_linear.py, kernels/attention/triton/invariant.py), in
decode steps and in prompts alike. They take the place of those of gpu_decode.py, on a copy that shares all tensors.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.adapt.gpu_decode import (
    FUSED_ACTIVATIONS,
    DecodeAttention,
    DecodeGated,
    DecodeLinear,
    attention_of,
    gated_of,
    is_plain_linear,
    is_plain_norm,
    optimize_for_gpu_decode,
)
from regard.adapt.quantized import QuantizedLinear
from regard.adapt.replace_modules import replace_modules
from regard.compat import cannot_run_triton
from regard.layout import TokenLayout
from regard.models.decoder import DecoderModule
from regard.models.encoder_decoder import EncoderDecoderModule
from regard.parts.block import BlockModule, Losses, SublayerModule
from regard.parts.norm import RMSNormModule
from regard.parts.position.base import PositionModule
from regard.parts.state import PerToken, State

SUPPORTED = (
    "it supports decoders like Llama and Qwen: blocks of attention (grouped heads, Rope, RMSNorm of queries and keys, "
    "windows) and gated units, each with an RMSNorm before it, without adapters"
)


class InvariantAttention(nn.Module):
    def __init__(self, decode: DecodeAttention):
        super().__init__()
        self.decode = decode

    def forward(self, x: Tensor, layout: TokenLayout, state: State) -> tuple[Tensor, Losses]:
        from regard.kernels.attention.triton.invariant import attend_invariant
        from regard.kernels.attention.triton.prepare_prompt import prepare_prompt

        decode: Any = self.decode  # its weights are tensors: `is_supported` refuses those of few bits
        body: Any = decode.sublayer.body
        qkv = linear(x, decode.qkv, decode.sublayer.norm, bias=decode.bias)  # (B, L, (H + 2 K) · E)
        norms, eps = decode.norms()
        k, v = state.pages(layout, "k", "v")
        q = prepare_prompt(
            qkv, decode.angles(qkv, layout), norms, eps, k.pool, v.pool, k.table, k.block, layout.positions,
            layout.valid, contract=False,
        )  # fmt: skip
        z = attend_invariant(
            q.transpose(1, 2), k.pool, v.pool, k.table, k.block, layout.positions, layout.derived(token_counts),
            body.scale, decode.before,
        )  # fmt: skip
        return linear(z, body.o_proj.weight, bias=body.o_proj.bias, residual=x), {}


class InvariantGated(nn.Module):
    def __init__(self, decode: DecodeGated):
        super().__init__()
        self.decode = decode

    def forward(self, x: Tensor, layout: TokenLayout, state: State) -> tuple[Tensor, Losses]:
        decode: Any = self.decode
        body: Any = decode.sublayer.body
        activation = FUSED_ACTIVATIONS[body.activation]
        h = linear(x, decode.gate_up, decode.sublayer.norm, bias=decode.bias, activation=activation)  # (B, L, F)
        return linear(h, body.down_proj.weight, bias=body.down_proj.bias, residual=x), {}


class InvariantLinear(nn.Module):
    def __init__(self, layer: DecodeLinear):
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, bias=self.bias)


class InvariantNorm(nn.Module):
    def __init__(self, norm: RMSNormModule):
        super().__init__()
        assert norm.weight is not None, "is_plain_norm has checked it"
        self.weight, self.eps = norm.weight, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        from regard.kernels.triton_invariant_linear import invariant_norm

        return invariant_norm(x.reshape(-1, x.shape[-1]).contiguous(), self.weight, self.eps).view(x.shape)


def make_batch_invariant(model: DecoderModule) -> DecoderModule:
    """A batch-invariant copy of the model, for a paged store; ValueError if a part of it is not supported."""
    if (name := unsupported_part(model)) is not None:
        raise ValueError(f"batch_invariant does not support {name} of this model; {SUPPORTED}")
    copy = optimize_for_gpu_decode(model)
    made: dict[type[nn.Module], Any] = {
        DecodeAttention: InvariantAttention, DecodeGated: InvariantGated, DecodeLinear: InvariantLinear
    }  # fmt: skip
    replace_modules(copy, lambda _, module: type(module) in made, lambda _, module: made[type(module)](module))
    assert isinstance(copy.norm, RMSNormModule), "unsupported_part has checked it"
    copy.norm = InvariantNorm(copy.norm)
    return copy


def check_batch_invariant(model: nn.Module, weight: Tensor) -> None:
    """Raise ValueError for an encoder-decoder, and if the kernels do not run on the device or in the dtype of a weight.

    The parts of a decoder are checked by `make_batch_invariant`.
    """
    if isinstance(model, EncoderDecoderModule):
        raise ValueError(f"batch_invariant does not support encoder-decoders; {SUPPORTED}")
    if reason := cannot_run_triton(weight.device):
        raise ValueError(
            f"batch_invariant {reason}: on a CPU, libraries choose the order of sums in matrix products by the number "
            "of tokens"
        )
    if weight.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"batch_invariant supports bfloat16 and float16, not {weight.dtype}; load the model in one")


def unsupported_part(model: DecoderModule) -> str | None:
    """The name and kind of the first part that is not supported; None if all are."""
    if type(model) is not DecoderModule:
        return f"the kind {type(model).__name__}"
    for name, module in model.stack.named_modules():
        if isinstance(module, SublayerModule) and not is_supported(module):
            return f"stack.{name} ({type(module.body).__name__})"
    for index, block in enumerate(model.stack.blocks):
        if type(block) is not BlockModule:
            return f"stack.blocks.{index} ({type(block).__name__})"
    layers = {name: getattr(model, name) for name in ("widen", "narrow", "head")}
    supported = {
        "position": type(model.position).share_bias is PositionModule.share_bias,
        "embedding_norm": type(model.embedding_norm) is nn.Identity,
        "norm": is_plain_norm(model.norm),
    } | {name: type(layer) is nn.Identity or is_plain_linear(layer) for name, layer in layers.items()}
    name = next((name for name, fits in supported.items() if not fits), None)
    return None if name is None else f"{name} ({type(getattr(model, name)).__name__})"


def is_supported(sublayer: SublayerModule) -> bool:
    quantized = any(isinstance(module, QuantizedLinear) for module in sublayer.modules())
    return not quantized and (attention_of(sublayer) is not None or gated_of(sublayer) is not None)


def keep_all_tokens(memory: Any) -> Any:
    """The declared states of a model, without ring buffers: layers with a window keep all tokens, in pages."""
    if isinstance(memory, tuple):
        return tuple(map(keep_all_tokens, memory))
    return replace(memory, window=None, first=0) if isinstance(memory, PerToken) else memory


def token_counts(layout: TokenLayout) -> Tensor:
    """(B,) the number of valid tokens of each row"""
    if layout.valid is None:
        rows, length = layout.positions.shape
        return torch.full((rows,), length, dtype=torch.int32, device=layout.positions.device)
    return layout.valid.sum(1, dtype=torch.int32)


def linear(
    x: Tensor, weight: Tensor, norm: nn.Module | None = None, *, bias: Tensor | None = None,
    residual: Tensor | None = None, activation: str | None = None,
) -> Tensor:  # fmt: skip
    """(…, D) -> (…, outputs)"""
    from regard.kernels.triton_invariant_linear import invariant_linear

    scale, eps = (norm.weight, norm.eps) if isinstance(norm, RMSNormModule) else (None, 0.0)
    residual = None if residual is None else residual.reshape(-1, residual.shape[-1]).contiguous()
    y = invariant_linear(x.reshape(-1, x.shape[-1]).contiguous(), weight, scale, eps, bias, residual, activation)
    return y.view(*x.shape[:-1], y.shape[-1])
