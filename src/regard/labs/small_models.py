"""The small models that labs compare: decoders that differ in the mixer only.

A block is a mixer and a SwiGLU. Attention has RoPE. With `convolution` a short convolution precedes the mixer, so that
every mixer has access to the previous token.
"""

from torch import nn

from regard.models.decoder import Decoder, DecoderModule
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.body import Body
from regard.parts.feedforward import SwiGLU
from regard.parts.linear_attention import LinearAttention
from regard.parts.position.rope import Rope
from regard.parts.recurrent import GRU, LSTM, RNN
from regard.parts.short_convolution import ShortConvolution
from regard.parts.ssm.mamba import Mamba
from regard.parts.ssm.mamba2 import Mamba2
from regard.parts.ssm.s4 import S4D
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


def decoder_spec(mixer: Body, vocab: int, width: int = 64, layers: int = 2, convolution: bool = False) -> Decoder:
    return Decoder(vocab, width, (Repeat((mixer_block(mixer, width, convolution),), layers),))


def mixer_block(mixer: Body, width: int, convolution: bool = False) -> Block:
    first = (Sublayer(ShortConvolution()),) if convolution else ()
    return Block((*first, Sublayer(mixer), Sublayer(SwiGLU(2 * width))))


def small_decoder(mixer: str, vocab: int, width: int = 64, layers: int = 2, convolution: bool = False) -> DecoderModule:
    """A decoder with one of MIXERS, initialized from the global generator."""
    return decoder_spec(MIXERS[mixer], vocab, width, layers, convolution).build()


def matched_spec(mixer: Body, reference: Body, vocab: int, width: int = 64, layers: int = 2) -> Decoder:
    """A decoder with as many parameters as one with the reference mixer; the width of its SwiGLU is adjusted."""
    difference = parameter_count(reference.build(width)) - parameter_count(mixer.build(width))
    hidden = 2 * width + round(difference / (3 * width))
    return Decoder(vocab, width, (Repeat((Block((Sublayer(mixer), Sublayer(SwiGLU(hidden)))),), layers),))


def parameter_count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
