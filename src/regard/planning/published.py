"""Published models as specs, to be planned by name: shapes from their papers and configs, without weights.

`scaled_llama(depth)` is a model of any size in the proportions of LLaMA (Touvron et al. 2023); depth 32 is the 7B:

    width = 128 · depth          depth heads of 128          hidden = 8/3 width, rounded up to a multiple of 256
    a block has about 4D² + 8D² = 12D² weights, a model 12 · depth · width²
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from regard.kernels.attention.patterns.window import Window
from regard.models.base import Model
from regard.models.decoder import Decoder
from regard.models.heads import Dense, Pooled
from regard.models.presets import bert, clip, transformer_2017, vit
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.body import Body
from regard.parts.experts import Experts
from regard.parts.feedforward import FeedForward, SwiGLU, eight_thirds
from regard.parts.norm import LayerNorm, NoNorm
from regard.parts.position.learned import Learned
from regard.parts.position.rope import Rope

HEAD_DIM = 128
UNITS = {"M": 1e6, "B": 1e9, "T": 1e12}


@dataclass(frozen=True)
class Published:
    paper: str
    spec: Callable[[], Model]
    tokens: float | None = None  # training tokens, if the paper states them


def llama(layers: int, width: int, mixer: Attention, body: Body, vocab: int, context: int) -> Decoder:
    block = Block((Sublayer(mixer), Sublayer(body)))
    return Decoder(vocab, width, (Repeat((block,), layers),), tied=False, context=context)


def rotary(heads: int, kv_heads: int | None = None) -> Attention:
    return Attention(heads, kv_heads, position=Rope())


def scaled_llama(depth: int, vocab: int = 32000, context: int = 2048) -> Decoder:
    if depth < 1:
        raise ValueError(f"depth={depth} must be at least 1")
    width = HEAD_DIM * depth
    return llama(depth, width, rotary(depth), SwiGLU(eight_thirds(width)), vocab, context)


def depth_for(parameters: float) -> int:
    """The depth at which the blocks of a scaled LLaMA have about this many weights."""
    return max(1, round((parameters / block_weights(1)) ** (1 / 3)))


def block_weights(depth: int) -> int:
    """The weights of all blocks of a scaled LLaMA, approximately."""
    return 12 * depth * (HEAD_DIM * depth) ** 2


def gpt(layers: int, width: int, heads: int, context: int, vocab: int = 50257) -> Decoder:
    norm = LayerNorm()
    block = Block((Sublayer(Attention(heads, bias=True), norm), Sublayer(FeedForward(4 * width), norm)))
    return Decoder(vocab, width, (Repeat((block,), layers),), position=Learned(context), norm=norm)


def palm() -> Decoder:
    """540B: one key head, no biases, attention and feed-forward in parallel, one table for embeddings and head."""
    width, norm = 18432, LayerNorm(bias=False)
    attention = Attention(48, kv_heads=1, head_dim=256, position=Rope())
    block = Block((Sublayer(attention, NoNorm()), Sublayer(SwiGLU(4 * width), NoNorm())), "parallel", norm)
    return Decoder(256_000, width, (Repeat((block,), 118),), norm=norm, context=2048)


def mistral() -> Decoder:
    return llama(32, 4096, replace(rotary(32, 8), mask=Window(4096)), SwiGLU(14336), 32000, 32768)


def mixtral() -> Decoder:
    return llama(32, 4096, rotary(32, 8), Experts(count=8, top_k=2, expert=SwiGLU(14336)), 32000, 32768)


def llama_7b() -> Decoder:
    return llama(32, 4096, rotary(32), SwiGLU(11008), 32000, 2048)


def llama_8b() -> Decoder:
    return llama(32, 4096, rotary(32, 8), SwiGLU(14336), 128256, 131072)


def llama_70b(vocab: int = 128256, context: int = 131072) -> Decoder:
    return llama(80, 8192, rotary(64, 8), SwiGLU(28672), vocab, context)


PUBLISHED = {
    "transformer-2017": Published("Vaswani et al. 2017", transformer_2017),
    "bert-base": Published("Devlin et al. 2018", lambda: bert(head=Pooled("cls", dense=Dense()))),
    "gpt2": Published("Radford et al. 2019", lambda: gpt(12, 768, 12, 1024)),
    "gpt3": Published("Brown et al. 2020", lambda: gpt(96, 12288, 96, 2048), 300e9),
    "palm-540b": Published("Chowdhery et al. 2022", palm, 780e9),
    "vit-b16": Published("Dosovitskiy et al. 2020", vit),
    "clip-b32": Published("Radford et al. 2021", clip),
    "llama-7b": Published("Touvron et al. 2023", llama_7b, 1.0e12),
    "llama-2-70b": Published("Touvron et al. 2023", lambda: llama_70b(32000, 4096), 2.0e12),
    "mistral-7b": Published("Jiang et al. 2023", mistral),
    "mixtral-8x7b": Published("Jiang et al. 2024", mixtral),
    "llama-3.1-8b": Published("Dubey et al. 2024", llama_8b, 15e12),
    "llama-3.1-70b": Published("Dubey et al. 2024", llama_70b, 15e12),
}


def find_published(name: str) -> Model | None:
    """The spec of a published model, or of a LLaMA of a size such as 7B; None if the name is neither."""
    if name in PUBLISHED:
        return PUBLISHED[name].spec()
    size = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([MBT])", name)
    return scaled_llama(depth_for(float(size[1]) * UNITS[size[2]])) if size else None
