"""The laws that every model must keep, whatever parts it is made of, and the table of models that are held to them.

A new part is tested by being listed in MODELS. Weights are drawn wide, so that attention is far from uniform and a
wrong mask, position or state cannot hide.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from regard.at import At
from regard.engine.stores.contiguous import Contiguous
from regard.engine.stores.paged import Paged
from regard.models.decoder import Decoder, DecoderModule
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.body import Body
from regard.parts.convolution import ShortConvolution
from regard.parts.feedforward import FeedForward, SwiGLU
from regard.parts.linear_attention import LinearAttention
from regard.parts.norm import LayerNorm, Norm, RMSNorm
from regard.parts.position.alibi import Alibi
from regard.parts.position.learned import Learned
from regard.parts.position.none import NoPosition, Position
from regard.parts.position.rope import Rope
from regard.parts.position.sinusoidal import Sinusoidal

VOCAB, WIDTH, CAPACITY = 31, 24, 32
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


def block(mixer: Body, body: Body | None = None, norm: Norm | None = None, style: str = "pre") -> Block:
    norm = norm or RMSNorm()
    return Block((Sublayer(mixer, norm), Sublayer(body or SwiGLU(40), norm)), style=style)


def decoder(*blocks: Block, position: Position | None = None, tied: bool = True) -> Decoder:
    return Decoder(VOCAB, WIDTH, (Repeat(blocks, 2),), position=position or NoPosition(), tied=tied)


GQA = Attention(4, 2, position=Rope())
MODELS = {
    "multi-head": decoder(block(Attention(4, position=Rope()))),
    "grouped-query": decoder(block(GQA), tied=False),
    "multi-query, own head_dim, biases": decoder(block(Attention(4, 1, head_dim=8, position=Rope(500.0), bias=True))),
    "alibi, three heads": decoder(block(Attention(3, position=Alibi()))),
    "alibi, grouped": decoder(block(Attention(6, 2, position=Alibi()))),
    "learned, layernorm, gelu": decoder(
        block(Attention(4, bias=True), FeedForward(40), LayerNorm()), position=Learned(64)
    ),
    "sinusoidal, post-norm, relu": decoder(
        block(Attention(2), FeedForward(40, "relu"), LayerNorm(), "post"), position=Sinusoidal()
    ),
    "no positions": decoder(block(Attention(2))),
    "linear": decoder(block(LinearAttention(4))),
    "linear, biases, sinusoidal": decoder(block(LinearAttention(2, bias=True)), position=Sinusoidal()),
    "short convolution": decoder(block(ShortConvolution(3)), block(GQA)),
    "hybrid": decoder(block(LinearAttention(3)), block(GQA)),
}

STORES: dict[str, Callable[[Decoder, int, torch.dtype], Contiguous | Paged]] = {
    "contiguous": lambda spec, rows, dtype: Contiguous(spec.memory(), rows, CAPACITY, dtype),
    "paged": lambda spec, rows, dtype: Paged(spec.memory(), rows, CAPACITY, rows * CAPACITY // 4, dtype, block=4),
}


def build(spec: Decoder, dtype: torch.dtype = torch.float64) -> DecoderModule:
    model = spec.build(seed=0).to(dtype).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.3, generator=generator)
        else:  # norms around one, biases too: neither may be a no-op
            parameter.normal_(mean=1.0, std=0.3, generator=generator)
    return model


def text(*shape: int, seed: int = 2) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def open_store(kind: str, model: DecoderModule, rows: int) -> Contiguous | Paged:
    """A store with room for every row, filled with what must never be read: a hole would be seen."""
    store = STORES[kind](model.spec, rows, model.embedding.weight.dtype)
    for row in range(rows):
        assert store.reserve(row, CAPACITY)
    for states in store.states:
        for state in states:
            arrays = getattr(state, "arrays", None) or getattr(state, "pages", None) or {}
            for array in [*arrays.values(), *([state.array] if hasattr(state, "array") else [])]:
                array.fill_(7.0)
    return store


def places(lengths: list[int], width: int, left: bool = False) -> At:
    """A padded batch: row b holds lengths[b] tokens, flush with the left or (padding on the left) with the right."""
    steps = torch.arange(width).expand(len(lengths), width)
    pads = torch.tensor(lengths).unsqueeze(-1)
    positions = steps - (width - pads) if left else steps
    valid = (positions >= 0) & (positions < pads)
    return At(positions.where(valid, 0), valid=valid)


def error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max().clamp_min(1.0)).item()
