"""Small decoders and encoders that differ in their position scheme only, for labs that compare schemes.

Absolute schemes are added to the embeddings by the stack, the others belong to each attention.
"""

from dataclasses import replace

from regard.kernels.attention.mask import Mask
from regard.labs.small_models import mixer_block
from regard.models.decoder import Decoder, DecoderModule
from regard.models.encoder import Encoder, EncoderModule
from regard.models.heads import MaskedLM
from regard.models.stack import Repeat, replace_bodies
from regard.parts.attention import Attention
from regard.parts.body import Body
from regard.parts.input import Tokens
from regard.parts.norm import RMSNorm
from regard.parts.position.alibi import Alibi
from regard.parts.position.base import NoPosition, Position
from regard.parts.position.learned import Learned
from regard.parts.position.rope import Rope
from regard.parts.position.rope_scaling import Scaling
from regard.parts.position.sinusoidal import Sinusoidal
from regard.parts.position.t5 import T5Buckets

HEADS, WIDTH = 4, 64
ABSOLUTE = ("sinusoidal", "learned")
SCHEMES = (*ABSOLUTE, "RoPE", "ALiBi", "T5", "none")


def position_of(scheme: str, length: int, tested: int) -> Position:
    """A scheme for training at `length`. A learned table has rows up to `tested`, so that longer sequences run at all.

    T5's last bucket starts near `length`, so that every bucket occurs in training.
    """
    return {
        "sinusoidal": Sinusoidal(),
        "learned": Learned(tested),
        "RoPE": Rope(),
        "ALiBi": Alibi(),
        "T5": T5Buckets(distance=length),
        "none": NoPosition(),
    }[scheme]


def decoder_with(scheme: str, vocab: int, layers: int, length: int, tested: int | None = None) -> DecoderModule:
    position = position_of(scheme, length, tested or length)
    in_stack = scheme in ABSOLUTE
    mixer = Attention(HEADS, position=NoPosition() if in_stack else position)
    blocks = (Repeat((mixer_block(mixer, WIDTH),), layers),)
    return Decoder(vocab, WIDTH, blocks, position if in_stack else NoPosition()).build()


def encoder_with(scheme: str, vocab: int, layers: int, length: int, mask: Mask | None = None) -> EncoderModule:
    """An encoder that predicts a token at every position; without a mask every token attends to all."""
    position = position_of(scheme, length, length)
    in_stack = scheme in ABSOLUTE
    mixer = Attention(HEADS, position=NoPosition() if in_stack else position, mask=mask)
    blocks = (Repeat((mixer_block(mixer, WIDTH),), layers),)
    return Encoder(
        Tokens(vocab), WIDTH, blocks, position if in_stack else NoPosition(), norm=RMSNorm(), head=MaskedLM()
    ).build()


def rescaled(model: DecoderModule, scaling: Scaling | None) -> DecoderModule:
    """A copy of a trained decoder with RoPE whose frequencies are scaled."""

    def scale(body: Body) -> Body:
        return replace(body, position=Rope(scaling=scaling)) if isinstance(body, Attention) else body

    spec = replace(model.spec, layers=replace_bodies(model.spec.layers, scale))
    copy = spec.build()
    copy.load_state_dict(model.state_dict())
    return copy.eval()
