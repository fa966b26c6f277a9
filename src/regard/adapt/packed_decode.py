"""A stack of packed weights that a CPU computes in one kernel per forward of a few tokens (kernels/packed).

Such a forward computes little between two products, so the overhead of calls and of synchronizing threads would take as
long as the products. Here a decode step is one call, without torch.compile, which takes a minute and 200 MB. It is for
inference on a copy of the modules, which shares all tensors. Longer inputs, other stores and gradients use the ordinary
modules.

It fits stacks of Llama's kind: pre-norm blocks of causal attention and SwiGLU with RMSNorm, without biases, where the
weights of all linear layers are packed (adapt/packing.py).
"""

from typing import Any

import torch
from torch import Tensor, nn

from regard.adapt.gpu_decode import is_plain_sublayer
from regard.adapt.quantized import QuantizedLinear
from regard.adapt.replace_modules import copy_modules
from regard.kernels.attention.mask import Causal
from regard.kernels.packed import decode_stack
from regard.layout import TokenLayout
from regard.models.decoder import DecoderModule
from regard.models.stack import Stack, States
from regard.parts.attention import AttentionModule, NoGate
from regard.parts.block import BlockModule, Losses
from regard.parts.feedforward import ACTIVATIONS, GatedModule
from regard.parts.position.base import PositionModule
from regard.parts.position.rope import RopeModule, rotations

MAX_TOKENS = 32  # of a forward; longer ones are faster in the ordinary modules


class PackedStack(nn.Module):
    def __init__(self, stack: Stack):
        super().__init__()
        self.stack = stack
        self.weights: list[Tensor] = []
        self.packing: list[int] = []
        for block in stack.blocks:
            attention, gated = block.sublayers  # ty: ignore[not-iterable]
            for norm, layers in (
                (attention.norm, attention_layers(attention.body)),
                (gated.norm, gated_layers(gated.body)),
            ):
                self.weights += [norm.weight, *(layer.packed for layer in layers)]
                for layer in layers:
                    self.packing += [layer.out_features, layer.packing.index, layer.packing.per_header]
        first: Any = stack.blocks[0]
        self.attention, self.eps = first.sublayers[0].body, first.sublayers[0].norm.eps

    def forward(self, x: Tensor, layout: TokenLayout, states: States | None = None) -> tuple[Tensor, Losses]:
        pages = self.pages(x, layout, states)
        if pages is None:
            return self.stack(x, layout, states)
        body = self.attention
        cos = sin = x.new_empty(0)
        if isinstance(body.position, RopeModule):
            cos, sin = (t[:, 0] for t in layout.derived(rotations, body.position.spec, body.position.dim, x.dtype))
        y = decode_stack(
            x, self.weights, self.packing, pages, cos, sin, layout.positions, layout.valid, body.heads, body.scale,
            self.eps,
        )  # fmt: skip
        return y, {}

    def pages(self, x: Tensor, layout: TokenLayout, states: States | None) -> list | None:
        """Keys and values of all blocks, or None if the kernel does not compute this forward."""
        exact = x.dtype != torch.float32 or torch.is_grad_enabled()
        tokens = x.shape[0] * x.shape[1]
        few = tokens > 0 and (x.shape[1] == 1 or tokens <= MAX_TOKENS)
        if states is None or exact or not few or layout.segments is not None or layout.inputs.bias is not None:
            return None
        found = []
        for attention, _ in states:
            pages: Any = attention.pages(layout, "k", "v") if hasattr(attention, "pages") else None
            if pages is None:
                return None
            found += pages
        return found


def fuse_packed_stack(model: DecoderModule) -> DecoderModule | None:
    """A copy of the model, which shares all tensors, with a PackedStack; None if its stack is of another kind."""
    if not fits(model.stack):
        return None
    copy = copy_modules(model)
    copy.stack = PackedStack(copy.stack)  # ty: ignore[invalid-assignment]
    return copy


def fits(stack: nn.Module) -> bool:
    if type(stack) is not Stack or not all(map(is_plain_block, stack.blocks)):
        return False
    return len({kind_of(block) for block in stack.blocks}) == 1


def is_plain_block(block: Any) -> bool:
    if type(block) is not BlockModule or len(block.sublayers) != 2 or not all(map(is_plain_sublayer, block.sublayers)):
        return False
    attention, gated = (sublayer.body for sublayer in block.sublayers)
    if type(attention) is not AttentionModule or type(gated) is not GatedModule:
        return False
    return (
        all(map(is_packed, (*attention_layers(attention), *gated_layers(gated))))
        and rotates_all_or_none(attention)
        and all(type(norm.norm) is nn.Identity for norm in (attention.q_norm, attention.k_norm))
        and type(attention.clip) is nn.Identity
        and type(attention.gate) is NoGate
        and attention.sinks is None
        and attention.softcap is None
        and type(attention.mask) is Causal
        and gated.activation is ACTIVATIONS["silu"]
        and gated.limit is None
        and not gated.offset
        and len({sublayer.norm.eps for sublayer in block.sublayers}) == 1
        and all(sublayer.norm.weight.dtype == torch.float32 for sublayer in block.sublayers)
    )


def kind_of(block: Any) -> tuple:
    """What the kernel takes to be the same in all blocks."""
    attention, gated = (sublayer.body for sublayer in block.sublayers)
    position = attention.position.spec if isinstance(attention.position, RopeModule) else None
    sizes = (attention.heads, attention.kv_heads, attention.q_proj.out_features, gated.gate_proj.out_features)
    return (*sizes, attention.scale, position, block.sublayers[0].norm.eps)


def rotates_all_or_none(attention: Any) -> bool:
    position, head_dim = attention.position, attention.q_proj.out_features // attention.heads
    rotates = isinstance(position, RopeModule) and position.spec.layout == "half" and position.dim == head_dim
    return rotates or type(position) is PositionModule


def is_packed(layer: nn.Module) -> bool:
    return type(layer) is QuantizedLinear and layer.packing is not None and layer.bias is None


def attention_layers(body: Any) -> tuple:
    return body.q_proj, body.k_proj, body.v_proj, body.o_proj


def gated_layers(body: Any) -> tuple:
    return body.gate_proj, body.up_proj, body.down_proj
