"""Published models as specs, with their sizes as defaults; smaller sizes make a small model of the same kind.

transformer_2017   Vaswani et al. 2017, base        bert   Devlin et al. 2018, base
vit                Dosovitskiy et al. 2020, B/16    clip   Radford et al. 2021, ViT-B/32
"""

from regard.kernels.attention.mask import Causal, Full, Mask
from regard.models.decoder import Decoder
from regard.models.dual_encoder import DualEncoder
from regard.models.encoder import Encoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.heads import Classification, Dense, Head, Pooled
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.cross_attention import CrossAttention
from regard.parts.feedforward import Activation, FeedForward
from regard.parts.input import Tokens
from regard.parts.norm import LayerNorm, NoNorm
from regard.parts.patches import Patches
from regard.parts.position.learned import Learned
from regard.parts.position.sinusoidal import Sinusoidal

BERT_DENSE = Dense("gelu", LayerNorm(1e-12))  # before the projection to the vocabulary


def transformer_2017(
    vocab: int = 37000, width: int = 512, heads: int = 8, hidden: int = 2048, layers: int = 6, dropout: float = 0.1
) -> EncoderDecoder:
    """Projections have no biases, as in the paper's equations; both embeddings and the head share one table."""
    norm, scale = LayerNorm(), width**0.5
    feedforward = Sublayer(FeedForward(hidden, "relu"), norm)
    encoder_attention = Sublayer(Attention(heads, mask=Full()), norm)
    encoder_block = Block((encoder_attention, feedforward), style="post", dropout=dropout)
    self_attention, cross_attention = Sublayer(Attention(heads), norm), Sublayer(CrossAttention(heads), norm)
    decoder_block = Block((self_attention, cross_attention, feedforward), style="post", dropout=dropout)
    return EncoderDecoder(
        Encoder(Tokens(vocab, scale=scale), width, (Repeat((encoder_block,), layers),), Sinusoidal(), dropout=dropout),
        Decoder(
            vocab,
            width,
            (Repeat((decoder_block,), layers),),
            Sinusoidal(),
            norm=NoNorm(),  # every sublayer ends in a norm
            embedding_scale=scale,
            dropout=dropout,
        ),
        shared=True,
    )


def bert(
    vocab: int = 30522, width: int = 768, heads: int = 12, hidden: int = 3072, layers: int = 12, length: int = 512,
    head: Head | None = None, dropout: float = 0.1,
) -> Encoder:  # fmt: skip
    norm = LayerNorm(1e-12)
    attention = Attention(heads, mask=Full(), bias=True, dropout=dropout)
    block = Block((Sublayer(attention, norm), Sublayer(FeedForward(hidden), norm)), style="post", dropout=dropout)
    return Encoder(
        Tokens(vocab, types=2),
        width,
        (Repeat((block,), layers),),
        Learned(length),
        embedding_norm=norm,
        head=head,
        dropout=dropout,
    )


def vit(
    image: int = 224, patch: int = 16, width: int = 768, heads: int = 12, hidden: int = 3072, layers: int = 12,
    labels: int = 1000,
) -> Encoder:  # fmt: skip
    norm = LayerNorm(1e-12)
    patches = Patches((patch, patch), (image, image))
    return Encoder(
        patches,
        width,
        (Repeat((pre_norm_block(heads, hidden, norm, Full(), "gelu"),), layers),),
        Learned(patches.length),
        norm=norm,
        head=Classification(labels),
    )


def clip(
    image: int = 224, patch: int = 32, width: int = 768, heads: int = 12, layers: int = 12,
    vocab: int = 49408, length: int = 77, text_width: int = 512, text_heads: int = 8, dim: int = 512,
) -> DualEncoder:  # fmt: skip
    norm = LayerNorm()
    patches = Patches((patch, patch), (image, image), bias=False)
    image_block = pre_norm_block(heads, 4 * width, norm, Full(), "quick_gelu")
    text_block = pre_norm_block(text_heads, 4 * text_width, norm, Causal(), "quick_gelu")
    image_encoder = Encoder(
        patches,
        width,
        (Repeat((image_block,), layers),),
        Learned(patches.length),
        embedding_norm=norm,
        norm=norm,
        head=Pooled("cls", dim),
    )
    text_encoder = Encoder(
        Tokens(vocab),
        text_width,
        (Repeat((text_block,), layers),),
        Learned(length),
        norm=norm,
        head=Pooled("last", dim),
    )
    return DualEncoder(image_encoder, text_encoder)


def pre_norm_block(heads: int, hidden: int, norm: LayerNorm, mask: Mask, activation: Activation) -> Block:
    return Block(
        (Sublayer(Attention(heads, mask=mask, bias=True), norm), Sublayer(FeedForward(hidden, activation), norm))
    )
