"""Attention and feed-forward whose weights several layers of a stack share, followed by each layer's own mixer.

    z = F(norm(attention(norm([x ; x₀]))))          x₀: the input of the stack
    out = mixer(norm(x + W z))                      W and the mixer belong to the layer

Layers with the same `number` share one set of weights. Each may adapt the shared projections P by its own matrices of
low rank, P x + B A x (LoRA). z is an input of the mixer only; it is not added to the residual stream.
Glorioso et al. 2024 (Zamba, Zamba2).
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from regard.kernels.attention.mask import Mask
from regard.layout import TokenLayout
from regard.parts.attention import Attention, AttentionModule
from regard.parts.body import Body
from regard.parts.feedforward import Gated
from regard.parts.norm import Norm, RMSNorm
from regard.parts.state import STATELESS, FixedSize, Memory, State, declarations
from regard.spec import SpecError, require


@dataclass(frozen=True)
class SharedBlock(Body):
    mixes: ClassVar[bool] = True

    attention: Attention  # its input [x ; x₀] is twice as wide as the stream
    feedforward: Gated
    mixer: Body
    number: int = 0
    norm: Norm = RMSNorm()  # before the attention, the feed-forward and the mixer
    attention_rank: int | None = None  # of the layer's adapters of q, k and v; None: no adapters
    rank: int | None = None  # of the layer's adapters of the feed-forward; None: no adapters

    def check(self) -> None:
        for name in ("attention_rank", "rank"):
            value = getattr(self, name)
            require(value is None or value > 0, f"shared_block: {name}={value} must be positive")
        require(
            self.mixer.mixes,
            f"shared_block: {self.mixer.kind} does not mix tokens; choose a mixer such as mamba2",
        )

    @property
    def causal(self) -> bool:
        return self.attention.causal and self.mixer.causal

    @property
    def bias_heads(self) -> int | None:
        return self.attention.bias_heads

    @property
    def max_exact_cache(self) -> int | None:
        return self.attention.max_exact_cache

    @property
    def max_keys(self) -> int | None:
        return self.attention.max_keys

    def with_default_mask(self, mask: Mask) -> Self:
        return replace(
            self,
            attention=self.attention.with_default_mask(mask),
            mixer=self.mixer.with_default_mask(mask),
        )

    def without_default_mask(self, mask: Mask) -> Self:
        return replace(
            self,
            attention=self.attention.without_default_mask(mask),
            mixer=self.mixer.without_default_mask(mask),
        )

    def attention_sizes(self, width: int) -> tuple[int, int, int]:
        return self.attention.sizes(2 * width)

    def build(self, width: int) -> nn.Module:
        self.memory(width)  # raises SpecError for a mixer with a per-token state
        return SharedBlockModule(width, self)

    def memory(self, width: int) -> Memory:
        fixed = self.mixer.memory(width)
        if not isinstance(fixed, FixedSize):
            raise SpecError(
                f"shared_block: {self.mixer.kind} has no state of fixed size; choose a recurrent mixer such as mamba2"
            )
        return *declarations(self.attention.memory(2 * width)), fixed

    def flops(self, width: int, tokens: int, keys: int) -> int:
        heads, kv_heads, head_dim = self.attention.sizes(2 * width)
        parts = (self.attention, 2 * width), (self.feedforward, width), (self.mixer, width)
        out = width * (width - heads * head_dim)  # W, and o_proj has width instead of 2 · width rows
        adapters = (self.attention_rank or 0) * (6 * width + (heads + 2 * kv_heads) * head_dim)
        adapters += 2 * (self.rank or 0) * (width + self.feedforward.hidden_dim(width))
        return sum(part.flops(size, tokens, keys) for part, size in parts) + 2 * tokens * (out + adapters)


class SharedBlockModule(nn.Module):
    def __init__(self, width: int, spec: SharedBlock):
        super().__init__()
        self.spec = spec
        self.block = SharedLayers(width, spec)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.norm = spec.norm.build(width)
        self.mixer = spec.mixer.build(width)

    def forward(self, x: Tensor, layout: TokenLayout, state: State = STATELESS) -> Tensor:
        return self.mixer(self.norm(x + self.o_proj(self.block(x, layout, state))), layout, state)


class SharedLayers(nn.Module):
    """The shared weights, and the layer's own adapters."""

    def __init__(self, width: int, spec: SharedBlock):
        super().__init__()
        self.attention_norm = spec.norm.build(2 * width)
        self.attention = AttentionModule(2 * width, spec.attention, out_width=width)
        self.feedforward_norm = spec.norm.build(width)
        self.feedforward = spec.feedforward.build(width)
        if spec.attention_rank is not None:
            for name in ("q_proj", "k_proj", "v_proj"):
                add_adapter(self.attention, name, nn.Linear(2 * width, spec.attention_rank, bias=False))
        if spec.rank is not None:
            down = nn.Linear(width, spec.rank, bias=False)  # A, shared by both projections
            for name in ("gate_proj", "up_proj"):
                add_adapter(self.feedforward, name, down)

    def forward(self, x: Tensor, layout: TokenLayout, state: State) -> Tensor:
        embeddings = x if layout.inputs.embeddings is None else layout.inputs.embeddings
        z = self.attention(self.attention_norm(torch.cat([x, embeddings], -1)), layout, state)  # (B, L, D)
        return self.feedforward(self.feedforward_norm(z))


class AdaptedLinear(nn.Module):
    """P x + B A x: a shared projection P and the layer's own adapter B A."""

    def __init__(self, base: nn.Linear, down: nn.Linear):
        super().__init__()
        self.base = base
        self.adapter = nn.Sequential(down, nn.Linear(down.out_features, base.out_features, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.adapter(x)


def add_adapter(module: nn.Module, name: str, down: nn.Linear) -> None:
    base = getattr(module, name)
    assert isinstance(base, nn.Linear), f"{name} is not a linear layer: {base}"
    setattr(module, name, AdaptedLinear(base, down))


def tie_shared_blocks(blocks: nn.Module) -> None:
    """Let all shared blocks of one number use the parameters of the first."""
    first: dict[int, SharedBlockModule] = {}
    for module in blocks.modules():
        if isinstance(module, SharedBlockModule):
            original = first.setdefault(module.spec.number, module)
            require(
                original.spec == replace(module.spec, mixer=original.spec.mixer),
                f"shared_block: number={module.spec.number} is used by blocks that differ; give them different numbers",
            )
            share_parameters(module.block, original.block)


def share_parameters(module: nn.Module, original: nn.Module) -> None:
    """Let the module use the parameters of the original, except those of adapters."""
    for name, parameter in original.named_parameters(recurse=False):
        setattr(module, name, parameter)
    for name, child in original.named_children():
        if name != "adapter":
            share_parameters(module.get_submodule(name), child)
