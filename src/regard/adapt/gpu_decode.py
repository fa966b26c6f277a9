"""Sublayers that take a few kernels on a GPU instead of dozens.

    attention       norm, W_q, W_k, W_v  →  rotation, append, attention  →  W_o, residual
    gated unit      norm, W_gate, W_up, activation, product  →  W_down, residual

An arrow separates kernels of a decode step. For prompts and many rows cuBLAS computes the matrix products, and Triton
kernels the norms, rotations and activations. Matrices that read the same input are stacked into one tensor, and the
parameters of the model become views of it, so no weight is kept twice and checkpoints do not change. For the decode
steps of all other sublayers torch.compile generates kernels, once for all layers of one kind. This is for inference: it
works on a copy of the modules that shares all tensors.

Weights of 4 or 8 bits that a kernel reads (gpu_quantized.py) are stacked and multiplied in the same way.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regard.adapt.gpu_quantized import gpu_weight, reads_on_gpu
from regard.adapt.quantized import QuantizedLinear
from regard.adapt.replace_modules import AnyModule, copy_modules, replace_modules
from regard.compat import COMPILE_OPTIONS, HAS_TRITON
from regard.kernels.attention.arguments import Pages
from regard.kernels.attention.mask import Causal
from regard.kernels.attention.patterns.window import Window
from regard.kernels.grouped_matmul import grouped_linear, row_experts
from regard.layout import TokenLayout
from regard.parts.attention import AttentionModule, NoGate
from regard.parts.block import Losses, ParallelBlockModule, SublayerModule
from regard.parts.experts import GroupedLinear
from regard.parts.feedforward import ACTIVATIONS, GatedModule
from regard.parts.norm import RMSNormModule
from regard.parts.position.base import PositionModule
from regard.parts.position.rope import RopeModule, rotations
from regard.parts.split_heads import merge_heads
from regard.parts.state import State

if TYPE_CHECKING:
    from regard.kernels.triton_quantized_linear import QuantizedWeight

MAX_COLUMNS = 32768  # of a matrix; one row of it is in the registers of a program
MAX_ROWS = 32  # of DecodeLinear; with more, cuBLAS reads the weights as fast
HEAD_DIMS = (32, 64, 128, 256)
FUSED_ACTIVATIONS = {ACTIVATIONS[name]: name for name in ("silu", "gelu", "gelu_tanh")}


class DecodeAttention(nn.Module):
    def __init__(self, sublayer: Any, stacked: "StackedWeights"):
        super().__init__()
        self.sublayer, body = sublayer, attention_of(sublayer)
        assert body is not None
        self.qkv, self.bias = stacked.stack(body.q_proj, body.k_proj, body.v_proj)
        self.before = body.mask.size - 1 if isinstance(body.mask, Window) else -1

    def forward(self, x: Tensor, layout: TokenLayout, state: State) -> tuple[Tensor, Losses]:
        pages = state.pages(layout, "k", "v")
        if pages is None or layout.inputs.bias is not None:
            return self.sublayer(x, layout, state)
        body: Any = self.sublayer.body
        qkv = linear(x, self.qkv, self.sublayer.norm, bias=self.bias)  # (B, L, (H + 2 K) · E)
        z = self.decode(qkv, layout, *pages) if x.shape[1] == 1 else self.prefill(qkv, layout, state, *pages)
        return linear(z, weight_of(body.o_proj), bias=body.o_proj.bias, residual=x), {}

    def decode(self, qkv: Tensor, layout: TokenLayout, k: Pages, v: Pages) -> Tensor:
        """(B, 1, H · E)"""
        from regard.kernels.attention.triton.decode_token import decode_token

        body: Any = self.sublayer.body
        cos, sin = (None, None) if (angles := self.angles(qkv, layout)) is None else (a[:, 0] for a in angles)
        norms, eps = self.norms()
        valid = None if layout.valid is None else layout.valid[:, 0]
        return decode_token(
            qkv[:, 0], cos, sin, *(norms or (None, None)), eps, k.pool, v.pool, k.table, k.block,
            layout.positions[:, 0], valid, body.scale, self.before,
        ).unsqueeze(1)  # fmt: skip

    def prefill(self, qkv: Tensor, layout: TokenLayout, state: Any, k: Pages, v: Pages) -> Tensor:
        """(B, L, H · E)"""
        from regard.kernels.attention.triton.prepare_prompt import prepare_prompt

        body: Any = self.sublayer.body
        norms, eps = self.norms()
        q = prepare_prompt(
            qkv, self.angles(qkv, layout), norms, eps, k.pool, v.pool, k.table, k.block, layout.positions, layout.valid
        )  # fmt: skip
        layout = state.key_layout(layout)
        return merge_heads(body.attend(q, k, v, layout, body.score_options(layout)))

    def angles(self, x: Tensor, layout: TokenLayout) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines (B, L, E / 2) of the rotation."""
        position: Any = self.sublayer.body.position
        if not isinstance(position, RopeModule):
            return None
        cos, sin = layout.derived(rotations, position.spec, position.dim, x.dtype)  # (B or 1, 1, L, E / 2)
        return cos[:, 0].expand(len(x), -1, -1), sin[:, 0].expand(len(x), -1, -1)

    def norms(self) -> tuple[tuple[Tensor, Tensor] | None, float]:
        """The weights of the norms of queries and keys, and their epsilon."""
        body: Any = self.sublayer.body
        q_norm, k_norm = body.q_norm.norm, body.k_norm.norm
        return ((q_norm.weight, k_norm.weight), q_norm.eps) if isinstance(q_norm, RMSNormModule) else (None, 0.0)


class DecodeGated(nn.Module):
    def __init__(self, sublayer: Any, stacked: "StackedWeights"):
        super().__init__()
        self.sublayer = sublayer
        body: Any = sublayer.body
        self.gate_up, self.bias = stacked.stack(body.gate_proj, body.up_proj)

    def forward(self, x: Tensor, layout: TokenLayout, state: State) -> tuple[Tensor, Losses]:
        body: Any = self.sublayer.body
        activation = FUSED_ACTIVATIONS[body.activation]
        h = linear(x, self.gate_up, self.sublayer.norm, bias=self.bias, activation=activation)  # (B, L, F)
        return linear(h, weight_of(body.down_proj), bias=body.down_proj.bias, residual=x), {}


class DecodeLinear(nn.Module):
    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        if not 1 <= x.numel() // x.shape[-1] <= MAX_ROWS:
            return nn.functional.linear(x, self.weight, self.bias)
        flat = x.reshape(1, -1, x.shape[-1])
        return linear(flat, self.weight, bias=self.bias).view(*x.shape[:-1], -1)


class DecodeExperts(nn.Module):
    """One linear layer per expert."""

    def __init__(self, layer: GroupedLinear):
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        from regard.kernels.triton_decode_experts import MAX_ROWS_PER_EXPERT, expert_linear

        if not 1 <= len(x) <= MAX_ROWS_PER_EXPERT * len(ends):
            return grouped_linear(x, self.weight, self.bias, ends)
        y = expert_linear(x, self.weight, ends)
        return y if self.bias is None else y + self.bias[row_experts(x, ends)]


class CompiledModule(nn.Module):
    """A sublayer, or a block of parallel sublayers, whose decode steps torch.compile generates kernels for."""

    def __init__(self, module: nn.Module, call: Callable[..., tuple[Tensor, Losses]]):
        super().__init__()
        self.module, self.call = module, call

    def forward(self, x: Tensor, layout: TokenLayout, state: Any = None) -> tuple[Tensor, Losses]:
        return self.call(self.module, x, layout, state) if x.shape[1] == 1 else self.module(x, layout, state)


def call_module(module: nn.Module, x: Tensor, layout: TokenLayout, state: Any) -> tuple[Tensor, Losses]:
    return module(x, layout, state)


class StackedWeights:
    """Linear layers whose weights are stacked in one tensor, of which their parameters are views."""

    def __init__(self) -> None:
        self.stacks: dict[tuple[int, ...], Tensor] = {}  # layers with tied weights share one

    def stack(self, *layers: Any) -> tuple["Tensor | QuantizedWeight", Tensor | None]:
        """The stacked weights and biases of these layers, which are all plain or all of one number format."""
        biases = [layer.bias for layer in layers]
        bias = None if biases[0] is None else self.join(biases)
        if not isinstance(layers[0], QuantizedLinear):
            return self.join([layer.weight for layer in layers]), bias
        names = layers[0].stored_names
        stored = {name: self.join([layer.get_buffer(name) for layer in layers]) for name in names}
        return gpu_weight(layers[0].format, stored), bias

    def join(self, tensors: list[Tensor]) -> Tensor:
        key = tuple(map(id, tensors))
        if key not in self.stacks:
            self.stacks[key] = torch.cat([tensor.data for tensor in tensors])
            for tensor, part in zip(tensors, self.stacks[key].split([len(t) for t in tensors]), strict=True):
                tensor.data = part
        return self.stacks[key]


def optimize_for_gpu_decode(model: AnyModule, fuse: bool = True) -> AnyModule:
    """A copy of the model with these modules where they apply; all tensors are shared with the original.

    fuse: use the fused sublayers and linear layers, which are for bfloat16 and float16.
    """
    copy = copy_modules(model)
    if not HAS_TRITON:
        return copy
    stacked, call = StackedWeights(), torch.compile(call_module, dynamic=True, **COMPILE_OPTIONS)

    def is_linear(_: str, module: nn.Module) -> bool:
        return fuse and (is_plain_linear(module) or type(module) is GroupedLinear)

    def fits(name: str, module: nn.Module) -> bool:
        return isinstance(module, SublayerModule | ParallelBlockModule) or is_linear(name, module)

    def make(_: str, module: nn.Module) -> nn.Module:
        if isinstance(module, nn.Linear):
            return DecodeLinear(module)
        if isinstance(module, GroupedLinear):
            return DecodeExperts(module)
        if fuse and attention_of(module) is not None:
            return DecodeAttention(module, stacked)
        if fuse and gated_of(module) is not None:
            return DecodeGated(module, stacked)
        replace_modules(module, is_linear, make)
        return CompiledModule(module, call)

    replace_modules(copy, fits, make)
    return copy


def attention_of(module: nn.Module) -> AttentionModule | None:
    """The attention of a sublayer that DecodeAttention computes."""
    if not is_plain_sublayer(module) or type(body := module.body) is not AttentionModule:
        return None
    head_dim = body.q_proj.out_features // body.heads if is_fused_linear(body.q_proj) else 0
    layers = (body.q_proj, body.k_proj, body.v_proj, body.o_proj)
    biases = {getattr(layer, "bias", None) is None for layer in layers[:3]}
    norms = (body.q_norm, body.k_norm)
    position = body.position
    rotates = isinstance(position, RopeModule) and position.spec.layout == "half" and position.dim == head_dim
    plain = (
        all(map(is_fused_linear, layers))
        and have_one_format(*layers[:3])
        and len(biases) == 1
        and head_dim in HEAD_DIMS
        and (rotates or type(position) is PositionModule)
        and all(type(n.norm) is nn.Identity or (n.heads == 1 and is_plain_norm(n.norm)) for n in norms)
        and type(body.clip) is nn.Identity
        and type(body.gate) is NoGate
        and body.sinks is None
        and body.softcap is None
        and (type(body.mask) is Causal or (type(body.mask) is Window and body.mask.causal))
    )
    return body if plain else None


def gated_of(module: nn.Module) -> GatedModule | None:
    """The gated unit of a sublayer that DecodeGated computes."""
    if not is_plain_sublayer(module) or type(body := module.body) is not GatedModule:
        return None
    layers = (body.gate_proj, body.up_proj, body.down_proj)
    fused = all(map(is_fused_linear, layers)) and have_one_format(*layers[:2])
    plain = fused and body.limit is None and not body.offset
    return body if plain and body.activation in FUSED_ACTIVATIONS else None


def is_plain_sublayer(module: nn.Module) -> bool:
    return (
        type(module) is SublayerModule
        and module.pre
        and module.keep == module.share == 1.0
        and module.scale is None
        and type(module.after) is nn.Identity
        and is_plain_norm(module.norm)
    )


def is_plain_norm(norm: nn.Module) -> bool:
    return type(norm) is RMSNormModule and norm.weight is not None and not norm.around_one


def is_plain_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear and has_fused_shape(module.in_features, module.out_features)


def is_fused_linear(module: nn.Module) -> bool:
    """Whether a kernel of `linear` multiplies the weight of this layer."""
    if type(module) is not QuantizedLinear:
        return is_plain_linear(module)
    readable = module.packing is None and reads_on_gpu(module.format, module.in_features)
    return readable and has_fused_shape(module.in_features, module.out_features)


def has_fused_shape(inputs: int, outputs: int) -> bool:
    return inputs % 8 == 0 and 16 <= inputs <= MAX_COLUMNS and outputs >= 16  # rows begin at multiples of 16 bytes


def have_one_format(*layers: Any) -> bool:
    return len({layer.format if isinstance(layer, QuantizedLinear) else None for layer in layers}) == 1


def weight_of(layer: Any) -> "Tensor | QuantizedWeight":
    return gpu_weight(layer.format, layer.stored) if isinstance(layer, QuantizedLinear) else layer.weight


def linear(
    x: Tensor, weight: "Tensor | QuantizedWeight", norm: nn.Module | None = None, *, bias: Tensor | None = None,
    residual: Tensor | None = None, activation: str | None = None,
) -> Tensor:  # fmt: skip
    """(B, L, D) -> (B, L, outputs)"""
    from regard.kernels.triton_decode_linear import decode_linear, launch
    from regard.kernels.triton_quantized_linear import launch_quantized

    scale, eps = (norm.weight, norm.eps) if isinstance(norm, RMSNormModule) else (None, 0.0)
    residual = None if residual is None else residual.flatten(0, 1).contiguous()
    rows = x.flatten(0, 1).contiguous()
    if isinstance(weight, Tensor):
        run = decode_linear if torch.compiler.is_compiling() else launch
        y = run(rows, weight, scale, eps, bias, residual, activation)
    else:
        y = launch_quantized(rows, weight, scale, eps, bias, residual, activation)
    return y.unflatten(0, x.shape[:2])
