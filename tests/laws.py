"""The models on which the laws of `regard.verify()` are tested. A new part is tested by adding it to a model here.

tests/models/test_matrix.py requires every mixer, position, scaling, mask, norm and feed-forward to be in some model.
"""

from collections.abc import Collection
from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor, nn

import regard  # noqa: F401  a new part needs no import: regard.NewPart(…)
from regard.kernels.attention.mask import Full, PrefixLM
from regard.kernels.attention.patterns.bigbird import BigBird
from regard.kernels.attention.patterns.block_pattern import BlockSparse
from regard.kernels.attention.patterns.longformer import Longformer
from regard.kernels.attention.patterns.sparse_transformer import FixedPattern, StridedPattern
from regard.kernels.attention.patterns.window import Dilated, SinksAndWindow, Window
from regard.models.base import Model
from regard.models.decoder import Decoder, DecoderModule
from regard.models.encoder import Encoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.heads import Classification, Dense, Distilled, Head, MaskedLM, Pooled, Pooler, PreTraining
from regard.models.interleaved import Interleaved
from regard.models.presets import BERT_DENSE, clip, transformer_2017
from regard.models.seq2seq import seq2seq
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.big_bird_attention import BigBirdAttention
from regard.parts.block import Block, Sublayer
from regard.parts.body import Body
from regard.parts.cross_attention import CrossAttention
from regard.parts.decayed_linear_attention import GatedLinear, Retention
from regard.parts.experts import Experts
from regard.parts.feedforward import FeedForward, Gated, SwiGLU
from regard.parts.frames import Frames
from regard.parts.global_attention import GlobalAttention
from regard.parts.input import Tokens
from regard.parts.latent_attention import LatentAttention
from regard.parts.linear_attention import IdentityFeatures, LinearAttention, PerformerFeatures
from regard.parts.linformer import Linformer
from regard.parts.native_sparse_attention import NativeSparse
from regard.parts.norm import LayerNorm, NoNorm, Norm, RMSNorm
from regard.parts.patches import Patches
from regard.parts.pooling import AttentionPooling
from regard.parts.position.alibi import Alibi
from regard.parts.position.base import NoPosition, Position
from regard.parts.position.learned import Learned
from regard.parts.position.rope import Rope
from regard.parts.position.rope2d import Rope2D
from regard.parts.position.rope_scaling import NTK, DynamicNTK, LinearScaling, Llama3, LongRope, Yarn
from regard.parts.position.sinusoidal import Sinusoidal
from regard.parts.position.t5 import T5Buckets
from regard.parts.recurrent import GRU, LSTM, RNN
from regard.parts.rg_lru import RGLRU
from regard.parts.router import Router
from regard.parts.rwkv import ChannelMixing, TimeMixing
from regard.parts.scored_attention import ScoredAttention
from regard.parts.shared_block import SharedBlock
from regard.parts.short_convolution import ShortConvolution
from regard.parts.ssm.mamba import Mamba
from regard.parts.ssm.mamba2 import Mamba2
from regard.parts.ssm.s4 import S4, S4D
from regard.parts.window_mlp import WindowMLP
from regard.verification.laws import LAWS
from regard.verification.outcome import Outcome, within_tolerance
from regard.verification.outcome import difference as error
from regard.verification.report import attempt
from regard.verification.trial import layout_with_padding, randomize_weights
from regard.verification.trials import trials

__all__ = [
    "MODELS",
    "OTHERS",
    "VOCAB",
    "WIDTH",
    "block",
    "build",
    "decoder",
    "error",
    "layout_with_padding",
    "random_ids",
]
VOCAB, WIDTH = 31, 24


def block(mixer: Body, body: Body | None = None, norm: Norm | None = None, style: str = "pre") -> Block:
    norm = norm or RMSNorm()
    return Block((Sublayer(mixer, norm), Sublayer(body or SwiGLU(40), norm)), style=style)


def decoder(*blocks: Block, position: Position | None = None, tied: bool = True) -> Decoder:
    return Decoder(VOCAB, WIDTH, (Repeat(blocks, 2),), position=position or NoPosition(), tied=tied)


def block_without_norm(body: Body) -> Block:
    return Block((Sublayer(body, NoNorm()),))


GQA = Attention(4, 2, position=Rope())
SHARED = SharedBlock(GQA, Gated(40, "gelu"), GRU(), 0, RMSNorm(), 3, 4)
MODELS = {
    "multi-head": decoder(block(Attention(4, position=Rope()))),
    "grouped-query": decoder(block(GQA), tied=False),
    "multi-query, explicit head_dim, biases": decoder(
        block(Attention(4, 1, head_dim=8, position=Rope(500.0), bias=True))
    ),
    "alibi, three heads": decoder(block(Attention(3, position=Alibi()))),
    "alibi, grouped": decoder(block(Attention(6, 2, position=Alibi()))),
    "alibi, scaled, smaller slopes": decoder(block(Attention(6, 2, position=Alibi(scaled=True, exponent=16.0)))),
    "learned, layernorm, gelu": decoder(
        block(Attention(4, bias=True), FeedForward(40), LayerNorm()), position=Learned(64)
    ),
    "sinusoidal, post-norm, relu": decoder(
        block(Attention(2), FeedForward(40, "relu"), LayerNorm(), "post"), position=Sinusoidal()
    ),
    "no positions": decoder(block(Attention(2))),
    "qk-norm": decoder(block(Attention(4, 2, qk_norm=RMSNorm(), position=Rope()))),
    "qk-norm over all": decoder(block(Attention(4, 2, qk_norm=RMSNorm(), norm_over="all", position=Rope()))),
    "softcap": decoder(block(Attention(4, 2, softcap=2.0, scale=1.0, position=Rope()))),
    "learned sinks": decoder(block(Attention(4, 2, sinks=True, position=Rope()))),
    "one gate per head": decoder(block(Attention(4, 2, gate="head", position=Rope()))),
    "one gate per channel": decoder(block(Attention(4, 2, gate="element", position=Rope()))),
    "tied layers": Decoder(VOCAB, WIDTH, (Repeat((block(GQA), block(GRU())), 2, tied=True), Repeat((block(GQA),)))),
    "latent": decoder(block(LatentAttention(3, 8, 6, 4))),
    "latent, query rank, yarn": decoder(
        block(LatentAttention(3, 8, 6, 4, 5, 10, Rope(100.0, scaling=Yarn(4.0, 16)), bias=True, scale=0.4))
    ),
    "latent, alibi": decoder(block(LatentAttention(3, 8, 6, 4, position=Alibi()))),
    "native sparse": decoder(block(NativeSparse(4, 2, None, 4, 2, 4, 3, 3, Rope()))),
    "native sparse, multi-query": decoder(block(NativeSparse(3, 1, 8, 2, 2, 2, 3, 2))),
    "native sparse, alibi": decoder(block(NativeSparse(4, 2, None, 4, 2, 2, 4, 5, Alibi()))),
    "additive": decoder(block(ScoredAttention(2, score_dim=5))),
    "dot": decoder(block(ScoredAttention(2, "dot"))),
    "general": decoder(block(ScoredAttention(1, "general")), position=T5Buckets(8, 16, heads=1)),
    "scaled dot, additive biased": decoder(
        block(ScoredAttention(4, "scaled")), block(ScoredAttention(4)), position=T5Buckets(8, 16, heads=4)
    ),
    "rope, interleaved": decoder(block(Attention(4, 2, position=Rope(layout="interleaved")))),
    "rope, a third of each head rotated": decoder(block(Attention(4, position=Rope(share=1 / 3)))),
    "rope, linear": decoder(block(Attention(4, position=Rope(scaling=LinearScaling(4.0))))),
    "rope, ntk": decoder(block(Attention(4, position=Rope(scaling=NTK(4.0))))),
    "rope, dynamic ntk": decoder(block(Attention(4, position=Rope(scaling=DynamicNTK(4.0, 16))))),
    "rope, yarn": decoder(block(Attention(4, 2, position=Rope(100.0, scaling=Yarn(4.0, 16))))),
    "rope, llama3": decoder(block(Attention(4, position=Rope(100.0, scaling=Llama3(4.0, 16))))),
    "rope, longrope": decoder(block(Attention(4, position=Rope(scaling=LongRope((1, 2, 3), (2, 4, 8), 4.0, 16))))),
    "rope in two dimensions": decoder(block(Attention(3, position=Rope2D(columns=4, prefix=1)))),
    "sinusoidal, half": decoder(block(Attention(2)), position=Sinusoidal(layout="half")),
    "learned, offset": decoder(block(Attention(2)), position=Learned(64, offset=2)),
    "learned, frozen; keys without a bias": decoder(
        block(Attention(2, bias=True, key_bias=False)), position=Learned(64, frozen=True)
    ),
    "t5 buckets of the stack": decoder(block(Attention(4, 2)), position=T5Buckets(8, 16, heads=4)),
    "t5 buckets of each attention": decoder(block(Attention(3, position=T5Buckets(8, 16, bidirectional=True)))),
    "norms around one": decoder(
        block(Attention(4, 2, qk_norm=RMSNorm(around_one=True)), norm=RMSNorm(around_one=True)),
    ),
    "squared relu, norms without weights": decoder(
        block(GQA, FeedForward(40, "relu2"), RMSNorm(weight=False)),
        block(GQA, FeedForward(), LayerNorm(bias=False, weight=False)),
    ),
    "clipped, limited": decoder(
        block(Attention(4, 2, position=Rope(), clip=0.5), Gated(20, "quick_gelu", True, limit=1.0, offset=1.0))
    ),
    "geglu, no norms": decoder(block(GQA, Gated(40, "gelu_tanh"), NoNorm())),
    "experts": decoder(block(GQA, Experts(4, 2, SwiGLU(20), capacity=1.0))),
    "experts, top one, biases": decoder(block(GQA, Experts(3, 1, FeedForward(20, "relu"), router=Router(bias=True)))),
    "experts, grouped, shared": decoder(
        block(
            GQA,
            Experts(
                8,
                3,
                Gated(12, "gelu"),
                shared=SwiGLU(24),
                shared_gate=True,
                router=Router("sigmoid", correction=True, groups=4, top_groups=2, scale=2.5, noise=True, jitter=0.1),
            ),
        )
    ),
    "window": decoder(block(Attention(4, 2, position=Rope(), mask=Window(5)))),
    "window, then full without positions": decoder(
        block(Attention(4, position=Rope(), mask=Window(3))), block(Attention(4, 2))
    ),
    "dilated": decoder(block(Attention(3, position=Alibi(), mask=Dilated(3, 2)))),
    "sinks and window": decoder(block(Attention(4, 1, position=Rope(), mask=SinksAndWindow(2, 4)))),
    "strided, then fixed": decoder(
        block(Attention(4, mask=StridedPattern(3))), block(Attention(4, mask=FixedPattern(4, 2))), position=Learned(96)
    ),
    "block-sparse": decoder(block(Attention(4, position=Rope(), mask=BlockSparse(3, ((0,), (0, 1), (1, 2), (0, 3)))))),
    "longformer, causal": decoder(block(Attention(4, position=Rope(), mask=Longformer(3, 2, causal=True)))),
    "bigbird, causal": decoder(block(Attention(4, position=Rope(), mask=BigBird(2, 1, 1, 1, causal=True)))),
    "parallel": decoder(Block((Sublayer(GQA, NoNorm()), Sublayer(SwiGLU(40), NoNorm())), "parallel", RMSNorm())),
    "sandwich norms, weighted residuals": decoder(
        Block((Sublayer(GQA, after=RMSNorm(), scale=0.5), Sublayer(SwiGLU(40), after=LayerNorm())), keep=1.5, share=0.5)
    ),
    "scaled embeddings, capped logits": Decoder(
        VOCAB,
        WIDTH,
        (Repeat((block(GQA),), 2),),
        tied=False,
        embedding_scale=2.0,
        embedding_norm=LayerNorm(),
        head_bias=True,
        logit_scale=0.5,
        softcap=4.0,
    ),
    "narrow embeddings": Decoder(
        VOCAB, WIDTH, (Repeat((block(GQA, style="post"),), 2),), norm=NoNorm(), embedding_dim=10
    ),
    "linear": decoder(block(LinearAttention(4))),
    "linear, biases, sinusoidal": decoder(block(LinearAttention(2, bias=True)), position=Sinusoidal()),
    "performer, then linear that is not normalized": decoder(
        block(LinearAttention(4, features=PerformerFeatures(9))),
        block(LinearAttention(3, features=IdentityFeatures(), normalize=False)),
    ),
    "retention, with and without gate and rotation": decoder(
        block(Retention(4)), block(Retention(2, 5, 9, LayerNorm(), False, False))
    ),
    # Not in one stack: a key of three numbers is sometimes nearly orthogonal to its query, and the norm of the head
    # rescales the small result. So a layer amplifies rounding errors, and two of them exceed the tolerance of float32.
    "gated linear, by channel": decoder(block(GatedLinear(4, rank=5, temperature=2.0))),
    "gated linear, by head": decoder(block(GatedLinear(3, decay="head", temperature=1.0))),
    "rwkv": decoder(Block((Sublayer(TimeMixing(30), LayerNorm()), Sublayer(ChannelMixing(40), LayerNorm())))),
    "rg-lru": decoder(block(RGLRU(4))),
    "rg-lru, wide, and a window": decoder(
        block(RGLRU(3, 30, 2, "relu")), block(Attention(4, 1, position=Rope(), mask=Window(5)))
    ),
    "short convolution": decoder(block(ShortConvolution(3)), block(GQA)),
    "s4": decoder(block(S4(6, 0.05, 0.5))),
    "s4d": decoder(block(S4D(8, 0.05, 0.5, bias=True))),
    "s4d, bilinear, no gate, then attention": decoder(
        block(S4D(4, gate=False, initial="inv", rule="bilinear")), block(GQA)
    ),
    "rnn, gru": decoder(block(RNN()), block(GRU(bias=False))),
    "rnn with relu, gru with reset before": decoder(
        block(RNN(9, bias=False, activation="relu")), block(GRU(17, reset="before"))
    ),
    "lstm, wide, then attention": decoder(Block((Sublayer(LSTM(30), NoNorm()),), keep=0.0), block(GQA)),
    "fixed window": decoder(block(WindowMLP(3, 17))),
    "mamba": decoder(block(Mamba(4, rank=3))),
    "mamba, norms, biases": decoder(block(Mamba(3, 1, 2, 3, bias=True, conv_bias=False, norm=RMSNorm()))),
    "mamba2, grouped, limited": decoder(block(Mamba2(4, 6, 1, 2, bias=True, norm_parts=2, shortest=0.5, longest=2.0))),
    "mamba2 and a window": decoder(block(Mamba2(4, 12)), block(Attention(4, 2, position=Rope(), mask=Window(5)))),
    "shared block": decoder(block_without_norm(SHARED), block(Mamba2(4, 12)), block_without_norm(SHARED)),
    "two shared blocks, no adapters, a window": decoder(
        block_without_norm(SharedBlock(Attention(3, mask=Window(4)), SwiGLU(20), Mamba2(4, 12), 0)),
        block_without_norm(SharedBlock(Attention(2, 1, position=Alibi()), SwiGLU(12), RGLRU(2), 1)),
    ),
    "hybrid": decoder(block(LinearAttention(3)), block(GQA)),
}


def encoder(*blocks: Block, position: Position | None = None, head: Head | None = None) -> Encoder:
    return Encoder(Tokens(VOCAB), WIDTH, (Repeat(blocks, 2),), position or NoPosition(), head=head)


def image_encoder(*blocks: Block) -> Encoder:
    """An encoder of images of 6 × 8 pixels in patches of 2 × 2."""
    return Encoder(Patches((2, 2), (6, 8), 3), WIDTH, (Repeat(blocks, 2),), Learned(13))


BIDIRECTIONAL = Attention(4, 2, position=Rope(), mask=Full())
ENCODER = encoder(block(BIDIRECTIONAL))
CROSS_BLOCK = Block((Sublayer(GQA), Sublayer(CrossAttention(4, 2)), Sublayer(SwiGLU(40))))
OTHERS: dict[str, Model] = {  # models other than decoders, which are tested with the laws that apply to them
    "encoder": ENCODER,
    "encoder, masked tokens": encoder(
        block(Attention(4, mask=Full(), bias=True)), position=Learned(96), head=MaskedLM(BERT_DENSE)
    ),
    "encoder, masked tokens and next sentence, narrow": Encoder(
        Tokens(VOCAB, types=2),
        WIDTH,
        (Repeat((block(Attention(4, mask=Full())),), 2),),
        Learned(96),
        head=PreTraining(MaskedLM(BERT_DENSE, tied=False), Classification(2, dense=Dense())),
        embedding_dim=10,
    ),
    "encoder, first token": encoder(block(BIDIRECTIONAL), head=Classification(3)),
    "encoder, mean, t5 buckets": encoder(
        block(Attention(4, mask=Full())), position=T5Buckets(8, 16, True, heads=4), head=Pooled("mean", 5)
    ),
    "encoder, pooler": encoder(block(BIDIRECTIONAL), head=Pooler()),
    "encoder, last token, experts": encoder(block(BIDIRECTIONAL, Experts(4, 2, SwiGLU(20))), head=Pooled("last")),
    "encoder, window": encoder(block(Attention(4, 2, position=Rope(), mask=Window(3, causal=False)))),
    "encoder, longformer, separate global projections": encoder(
        block(GlobalAttention(4, 2, position=Rope(), mask=Longformer(2, 2))),
        block(GlobalAttention(4, mask=Window(3, causal=False), bias=True)),
    ),
    "encoder, longformer": encoder(block(Attention(4, mask=Longformer(2, 2))), position=Sinusoidal()),
    "encoder, bigbird, both ends": encoder(block(BigBirdAttention(4, 2, block=2, links=1)), position=Sinusoidal()),
    "encoder, bigbird": encoder(block(Attention(4, position=Alibi(), mask=BigBird(2, 1, 1, 1, length=64)))),
    "encoder, prefix": encoder(block(Attention(4, position=Rope(), mask=PrefixLM(4)))),
    "encoder, bidirectional linear attention, performer": encoder(
        block(LinearAttention(4, bidirectional=True)),
        block(LinearAttention(4, features=PerformerFeatures(), bidirectional=True)),
        position=Sinusoidal(),
    ),
    "encoder, linformer": encoder(block(Linformer(4, 96, 5)), block(Linformer(2, 96, 7, shared=True, bias=True))),
    "encoder, bidirectional s4": encoder(block(S4(4, bidirectional=True))),
    "encoder, bidirectional s4d": encoder(block(S4D(4, bidirectional=True)), head=Pooled("mean", 5)),
    "encoder of audio frames": Encoder(Frames(5), WIDTH, (Repeat((block(BIDIRECTIONAL),), 2),), Sinusoidal()),
    "encoder, a learned query": encoder(
        block(BIDIRECTIONAL), head=Pooled(dim=5, bias=True, probe=AttentionPooling(CrossAttention(4, 2, bias=True)))
    ),
    "encoder, first token and mean": encoder(block(BIDIRECTIONAL), head=Classification(3, "cls_mean")),
    "encoder of images, distilled": replace(
        image_encoder(block(Attention(3, mask=Full()))),
        input=Patches((2, 2), (6, 8), 3, registers=1),
        position=Learned(14),
        head=Distilled(3),
    ),
    "encoder of images": image_encoder(block(Attention(3, mask=Full(), position=Rope2D(columns=4, prefix=1)))),
    "encoder-decoder": EncoderDecoder(ENCODER, decoder(CROSS_BLOCK)),
    "encoder-decoder, 2017": transformer_2017(VOCAB, WIDTH, 4, 40, 2),
    "encoder-decoder, with a recurrence": EncoderDecoder(ENCODER, decoder(CROSS_BLOCK, block(LinearAttention(4)))),
    "images to text": EncoderDecoder(image_encoder(block(BIDIRECTIONAL)), decoder(CROSS_BLOCK)),
    "seq2seq": seq2seq(VOCAB, WIDTH),
    "seq2seq, additive, bidirectional": seq2seq(VOCAB, WIDTH, GRU(), "additive", 2, bidirectional=True),
    "seq2seq, general": seq2seq(VOCAB, WIDTH, LSTM(), "general", bidirectional=True),
    "images and texts, contrastive": clip(8, 4, WIDTH, 2, 2, VOCAB, 48, WIDTH, 4, dim=5),
    "interleaved images": Interleaved(image_encoder(block(BIDIRECTIONAL)), decoder(block(GQA)), marker=3),
    "interleaved images, inner features": Interleaved(
        image_encoder(block(BIDIRECTIONAL)), decoder(block(GQA)), marker=3, features=(-2, 0), whole=True
    ),
}


def build(spec: Decoder, dtype: torch.dtype = torch.float64) -> DecoderModule:
    model = spec.build(seed=0).to(dtype).eval().requires_grad_(False)
    randomize_weights(model, seed=1)
    return model


def assert_equal_weights(found: nn.Module, expected: nn.Module) -> None:
    """Equal bit for bit. The outputs may still differ in rounding: BLAS depends on the alignment of the weights."""
    tensors, expected_tensors = found.state_dict(), expected.state_dict()
    assert tensors.keys() == expected_tensors.keys()
    assert all(torch.equal(tensor, expected_tensors[name]) for name, tensor in tensors.items())


def random_ids(*shape: int, seed: int = 2) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def broken_laws(
    model: nn.Module, length: int, seed: int = 0, laws: Collection[str] = LAWS
) -> dict[tuple[str, str], Outcome]:
    """The laws that the model breaks in float64, by (part of the model, law); "" is the whole model."""
    copy = deepcopy(model).double().eval().requires_grad_(False)
    outcomes = {
        (part, law): attempt(law, trial) for part, trial in trials(copy, length, seed=seed).items() for law in laws
    }
    return {key: outcome for key, outcome in outcomes.items() if not within_tolerance(outcome, torch.float64)}
