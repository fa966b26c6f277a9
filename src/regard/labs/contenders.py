"""The small models that labs compare: one decoder, only the mixer differs.

A block is a mixer and a SwiGLU, as everywhere. Attention gets RoPE. Where `neighbours` asks for it, a short convolution
stands in front, so that a token knows the one before it whatever mixes.
"""

from torch import nn

from regard.models.decoder import Decoder, DecoderModule
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.body import Body
from regard.parts.feedforward import SwiGLU
from regard.parts.gru import GRU
from regard.parts.linear_attention import LinearAttention
from regard.parts.lstm import LSTM
from regard.parts.position.rope import Rope
from regard.parts.rnn import RNN
from regard.parts.short_convolution import ShortConvolution
from regard.parts.ssm.mamba import Mamba
from regard.parts.ssm.mamba2 import Mamba2
from regard.parts.ssm.s4d import S4D
from regard.parts.window_mlp import WindowMLP

MIXERS: dict[str, Body] = {
    "window": WindowMLP(5),
    "RNN": RNN(),
    "LSTM": LSTM(),
    "GRU": GRU(),
    "attention": Attention(4, position=Rope()),
    "linear attention": LinearAttention(4),
    "S4D": S4D(),
    "Mamba": Mamba(),
    "Mamba-2": Mamba2(),
}


def spec(mixer: Body, vocab: int, width: int = 64, layers: int = 2, neighbours: bool = False) -> Decoder:
    return Decoder(vocab, width, (Repeat((block(mixer, width, neighbours),), layers),))


def block(mixer: Body, width: int, neighbours: bool = False) -> Block:
    front = (Sublayer(ShortConvolution()),) if neighbours else ()
    return Block((*front, Sublayer(mixer), Sublayer(SwiGLU(2 * width))))


def contender(name: str, vocab: int, width: int = 64, layers: int = 2, neighbours: bool = False) -> DecoderModule:
    """A fresh model, drawn from torch's own generator."""
    return spec(MIXERS[name], vocab, width, layers, neighbours).build()


def equal(mixer: Body, like: Body, vocab: int, width: int = 64, layers: int = 2) -> Decoder:
    """As many parameters as the usual spec of `like` has: the SwiGLU is wider or narrower for it."""
    spare = parameters(like.build(width)) - parameters(mixer.build(width))
    hidden = 2 * width + round(spare / (3 * width))
    return Decoder(vocab, width, (Repeat((Block((Sublayer(mixer), Sublayer(SwiGLU(hidden)))),), layers),))


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
