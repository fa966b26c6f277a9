"""Hypothesis strategies for decoders of any parts: small, but with every option that a part has.

The tables list a strategy per kind. A part without one is drawn as the decoders of tests/laws.py have it, so a new part
needs no strategy here. tests/models/test_random_specs.py compares these tables with the table of kinds.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cache
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from regard.kernels.attention.mask import Causal, Mask
from regard.kernels.attention.patterns.bigbird import BigBird
from regard.kernels.attention.patterns.block_pattern import BlockSparse
from regard.kernels.attention.patterns.longformer import Longformer
from regard.kernels.attention.patterns.sparse_transformer import FixedPattern, StridedPattern
from regard.kernels.attention.patterns.window import Dilated, SinksAndWindow, Window
from regard.models.decoder import Decoder
from regard.models.stack import Repeat, check_shared_bias
from regard.parts.attention import GATES, Attention
from regard.parts.block import Block, Sublayer
from regard.parts.body import Body
from regard.parts.decayed_linear_attention import GatedLinear, Retention
from regard.parts.experts import Experts
from regard.parts.feedforward import ACTIVATIONS, FeedForward, Gated, SwiGLU
from regard.parts.latent_attention import LatentAttention
from regard.parts.linear_attention import EluFeatures, IdentityFeatures, LinearAttention, PerformerFeatures
from regard.parts.native_sparse_attention import NativeSparse
from regard.parts.norm import LayerNorm, NoNorm, Norm, RMSNorm
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
from regard.spec import Spec, SpecError, class_of, field_types
from regard.verification.length import nested_specs
from tests.laws import MODELS

VOCAB, HEAD_DIM = 29, 8
LEARNED_LENGTH = 96  # of the tables of learned positions
sizes, flags, factors = st.integers(1, 5), st.booleans(), st.sampled_from([0.5, 1.0, 2.0])
pairs = st.lists(st.floats(1, 8), min_size=HEAD_DIM // 2, max_size=HEAD_DIM // 2).map(tuple)
lengths, stretches = st.integers(16, 64), st.floats(1, 8)


def other_parts(
    base: type, known: Collection[str], suitable: Callable[[Any], bool] = lambda part: True
) -> dict[str, list]:
    """The parts in the decoders of tests/laws.py that have no strategy here, by kind."""
    found: dict[str, list[Spec]] = {}
    for spec in MODELS.values():
        for part in nested_specs(spec):
            if isinstance(part, base) and part.kind not in known and suitable(part):
                found.setdefault(part.kind, []).append(part)
    return found


def sample_each(found: dict[str, list]) -> dict[str, SearchStrategy]:
    return {kind: st.sampled_from(values) for kind, values in found.items()}


NORMS: dict[str, SearchStrategy[Norm]] = {
    "layernorm": st.sampled_from([LayerNorm(), LayerNorm(bias=False), LayerNorm(bias=False, weight=False)]),
    "rmsnorm": st.sampled_from([RMSNorm(), RMSNorm(weight=False), RMSNorm(around_one=True)]),
    "no_norm": st.just(NoNorm()),
}
norms = st.one_of(*NORMS.values())
real_norms = NORMS["layernorm"] | NORMS["rmsnorm"]

MASKS: dict[str, SearchStrategy[Mask]] = {
    "causal": st.just(Causal()),
    "window": st.builds(Window, st.integers(1, 9)),
    "dilated": st.builds(Dilated, sizes, st.integers(1, 3)),
    "sinks_and_window": st.builds(SinksAndWindow, st.integers(1, 3), sizes),
    "strided": st.builds(StridedPattern, st.integers(2, 5)),
    "fixed": st.builds(FixedPattern, st.integers(3, 6), st.integers(1, 2)),
    "block_sparse": st.builds(BlockSparse, st.integers(1, 4), st.just(((0,), (0, 1), (0, 2), (1, 3)))),
    "longformer": st.builds(Longformer, sizes, st.integers(1, 3), st.just(True)),
    "bigbird": st.builds(
        BigBird, st.integers(1, 3), st.sampled_from([1, 3]), st.integers(1, 2), st.integers(1, 2), causal=st.just(True)
    ),
}
MASKS |= sample_each(other_parts(Mask, MASKS, lambda mask: mask.causal))
masks = st.one_of(*MASKS.values())

positive_features = st.just(EluFeatures()) | st.builds(PerformerFeatures, count=st.none() | sizes)
SCALINGS = {
    "linear": st.builds(LinearScaling, stretches),
    "ntk": st.builds(NTK, stretches),
    "dynamic_ntk": st.builds(DynamicNTK, stretches, lengths),
    "yarn": st.builds(Yarn, stretches, lengths, truncate=flags),
    "llama3": st.builds(Llama3, stretches, lengths),
    "longrope": st.builds(LongRope, pairs, pairs, stretches, lengths),
}
POSITIONS: dict[str, SearchStrategy[Position]] = {  # of an attention whose heads have HEAD_DIM coordinates
    "no_position": st.just(NoPosition()),
    "rope": st.builds(
        Rope,
        base=st.sampled_from([50.0, 10000.0]),
        layout=st.sampled_from(["half", "interleaved"]),
        scaling=st.none() | st.one_of(*SCALINGS.values()),
    )
    | st.builds(Rope, share=st.sampled_from([0.25, 0.5])),
    "rope2d": st.builds(Rope2D, columns=sizes, prefix=st.integers(0, 2)),
    "alibi": st.builds(Alibi, scaled=flags, exponent=st.sampled_from([8.0, 16.0])),
    "t5_buckets": st.builds(T5Buckets, buckets=st.just(8), distance=st.integers(6, 20), bidirectional=flags),
}
ONLY_STACK = ("learned", "sinusoidal")
POSITIONS |= sample_each(other_parts(Position, (*POSITIONS, *ONLY_STACK), lambda scheme: "attention" in scheme.places))
positions = st.one_of(*POSITIONS.values())


@cache
def stack_positions(heads: int) -> dict[str, SearchStrategy[Position]]:
    return sample_each(other_parts(Position, (*POSITIONS, *ONLY_STACK))) | {
        "no_position": st.just(NoPosition()),
        "learned": st.builds(Learned, length=st.just(LEARNED_LENGTH), offset=st.integers(0, 2)),
        "sinusoidal": st.builds(Sinusoidal, layout=st.sampled_from(["half", "interleaved"])),
        "t5_buckets": st.builds(T5Buckets, buckets=st.just(8), distance=st.integers(6, 20), heads=st.just(heads)),
    }


@cache  # hypothesis validates a strategy on its first use, which takes longer than drawing
def mixers(heads: int) -> dict[str, SearchStrategy[Body]]:
    shared = st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0])
    all_heads = st.just(heads)
    table = {
        "attention": st.builds(
            Attention,
            heads=all_heads,
            kv_heads=shared,
            head_dim=st.just(HEAD_DIM),
            position=positions,
            mask=masks,
            bias=flags,
            out_bias=st.none() | flags,
            qk_norm=st.none() | norms,
            norm_over=st.sampled_from(["head", "all"]),
            clip=st.none() | st.floats(0.5, 3.0),
            scale=st.none() | st.floats(0.1, 1.0),
            softcap=st.none() | st.floats(1.0, 30.0),
            sinks=flags,
            gate=st.sampled_from(sorted(GATES)),
            dropout=st.sampled_from([0.0, 0.1]),
        ),
        "latent_attention": st.builds(
            LatentAttention,
            heads=all_heads,
            rank=st.integers(4, 9),  # a norm over two numbers is nearly their sign, and magnifies rounding
            nope_dim=sizes,
            rope_dim=st.just(HEAD_DIM),
            v_dim=st.none() | sizes,
            query_rank=st.none() | st.integers(4, 9),
            position=positions,
            mask=masks,
            norm=norms,
            bias=flags,
        ),
        "native_sparse": st.builds(
            NativeSparse,
            heads=all_heads,
            kv_heads=shared,
            head_dim=st.just(HEAD_DIM),
            length=st.sampled_from([2, 4]),
            stride=st.sampled_from([1, 2]),
            block=st.sampled_from([2, 4]),
            select=st.integers(3, 4),
            window=sizes,
            position=positions,
        ),
        "scored_attention": st.builds(
            ScoredAttention,
            heads=all_heads,
            score=st.sampled_from(["additive", "dot", "general", "scaled"]),
            mask=st.none() | masks,
        ),
        "linear_attention": st.builds(LinearAttention, heads=all_heads, bias=flags, features=positive_features)
        | st.builds(LinearAttention, heads=all_heads, features=st.just(IdentityFeatures()), normalize=st.just(False)),
        "retention": st.builds(
            Retention,
            heads=all_heads,
            key_dim=st.none() | st.sampled_from([2, 6]),
            value_dim=st.none() | sizes,
            norm=norms,
            gate=flags,
            rotation=flags,
            base=st.sampled_from([50.0, 10000.0]),
        ),
        "gated_linear": st.builds(
            GatedLinear,
            heads=all_heads,
            key_dim=st.none() | sizes,
            value_dim=st.none() | sizes,
            norm=norms,
            gate=flags,
            decay=st.sampled_from(["channel", "head"]),
            rank=sizes,
            temperature=factors,
        ),
        "time_mixing": st.builds(TimeMixing, hidden=st.none() | hidden),
        "channel_mixing": st.builds(ChannelMixing, hidden=st.none() | hidden),
        "mamba": st.builds(
            Mamba, state=sizes, expand=st.integers(1, 2), rank=st.none() | sizes, taps=sizes, bias=flags, norm=norms
        ),
        "mamba2": st.builds(
            Mamba2,
            state=sizes,
            head_dim=st.sampled_from([2, 4, 8]),
            groups=st.integers(1, 2),
            taps=sizes,
            norm=norms,
            norm_parts=st.integers(1, 2),
            shortest=st.none() | st.just(0.5),
            longest=st.none() | st.just(2.0),
        ),
        "rg_lru": st.builds(
            RGLRU,
            heads=all_heads,
            hidden=st.none() | sizes.map(lambda n: n * heads),
            taps=sizes,
            activation=activations,
        ),
        "shared_block": st.builds(
            SharedBlock,
            attention=st.builds(
                Attention, heads=all_heads, kv_heads=shared, head_dim=st.just(HEAD_DIM), position=positions, mask=masks
            ),
            feedforward=SIMPLE["gated"],
            mixer=st.builds(GRU) | st.builds(Mamba2, state=sizes, head_dim=st.just(HEAD_DIM)),
            number=st.uuids().map(lambda id: id.int % 10**9),  # distinct: blocks with the same number must be equal
            norm=norms,
            attention_rank=st.none() | sizes,
            rank=st.none() | sizes,
        ),
        "short_convolution": st.builds(ShortConvolution, taps=st.integers(2, 5)),
        "s4": st.builds(S4, state=st.sampled_from([2, 4, 6]), activation=activations, gate=flags, bias=flags),
        "s4d": st.builds(
            S4D,
            state=st.sampled_from([2, 4, 6]),
            activation=activations,
            gate=flags,
            bias=flags,
            initial=st.sampled_from(["lin", "inv", "legs", "real"]),
            rule=st.sampled_from(["zoh", "bilinear"]),
        ),
        "fixed_window": st.builds(WindowMLP, size=sizes, hidden=st.none() | hidden),
        "rnn": st.builds(RNN, hidden=st.none() | hidden, bias=flags, activation=st.sampled_from(["tanh", "relu"])),
        "lstm": st.builds(LSTM, hidden=st.none() | hidden, bias=flags),
        "gru": st.builds(GRU, hidden=st.none() | hidden, bias=flags, reset=st.sampled_from(["before", "after"])),
    }
    others = other_parts(Body, table, lambda body: body.mixes and body.causal)
    return table | sample_each({kind: [resized(body, heads) for body in bodies] for kind, bodies in others.items()})


def resized(body: Body, heads: int) -> Body:
    new_sizes = {"heads": heads, "kv_heads": None, "head_dim": HEAD_DIM}
    return replace(body, **{name: size for name, size in new_sizes.items() if name in field_types(type(body))})


activations = st.sampled_from(sorted(ACTIVATIONS))
hidden = st.integers(3, 20)
SIMPLE = {
    "feedforward": st.builds(FeedForward, hidden=hidden, activation=activations, bias=flags),
    "gated": st.builds(
        Gated,
        hidden=hidden,
        activation=activations,
        bias=flags,
        limit=st.none() | st.floats(0.5, 3.0),
        offset=st.sampled_from([0.0, 1.0]),
    ),
    "swiglu": st.builds(SwiGLU, hidden=hidden),
}
simple = st.one_of(*SIMPLE.values())
routers = st.builds(
    Router,
    scores=st.sampled_from(["softmax", "sigmoid"]),
    renormalize=st.none() | flags,
    scale=factors,
    bias=flags,
    correction=flags,
    jitter=st.sampled_from([0.0, 0.1]),
    noise=flags,
) | st.builds(Router, groups=st.just(2), top_groups=st.integers(1, 2), group_best=st.integers(1, 2))
FEEDFORWARDS: dict[str, SearchStrategy[Body]] = {
    **SIMPLE,
    "experts": st.builds(
        Experts,
        count=st.sampled_from([4, 6]),
        top_k=st.integers(1, 2),
        expert=simple,
        shared=st.none() | simple,
        router=routers,
        z=st.sampled_from([0.0, 0.01]),
        capacity=st.none() | st.floats(0.5, 2.0),
    ),
}
FEEDFORWARDS |= sample_each(other_parts(Body, FEEDFORWARDS, lambda body: not body.mixes))
feedforwards = st.one_of(*FEEDFORWARDS.values())


@st.composite
def blocks(draw: st.DrawFn, heads: int) -> Block:
    bodies = [draw(st.one_of(*mixers(heads).values())), draw(feedforwards)]
    if draw(st.integers(0, 3)) == 0:
        bodies.insert(0, draw(st.one_of(*mixers(heads).values())))
    style = draw(st.sampled_from(["pre", "post", "parallel"]))
    shared_norm = draw(st.none() | real_norms) if style == "parallel" else None
    return Block(
        tuple(
            Sublayer(
                body,
                draw(norms) if shared_norm is None else NoNorm(),
                after=draw(st.none() | real_norms),
                scale=draw(st.none() | factors),
            )
            for body in bodies
        ),
        style=style,
        norm=shared_norm,
        keep=draw(factors),
        share=draw(factors),
        dropout=draw(st.sampled_from([0.0, 0.1])),
    )


@st.composite
def hybrids(draw: st.DrawFn) -> Decoder:
    """Layers with full attention, with windows, and recurrences: at least two of these kinds."""
    heads = draw(st.sampled_from([1, 2]))
    table = mixers(heads)
    windows = st.one_of(st.builds(Window, sizes), st.builds(SinksAndWindow, st.integers(1, 2), st.integers(1, 3)))
    attention_fields = {"mask", "position"}
    kinds = {
        "full": st.builds(replace, table["attention"], mask=st.just(Causal())),
        "local": st.builds(replace, table["attention"] | table["latent_attention"], mask=windows),
        "recurrent": st.one_of(
            *(table[kind] for kind in table if attention_fields.isdisjoint(field_types(class_of(kind, ""))))
        ),
    }
    pattern = draw(st.lists(st.sampled_from(sorted(kinds)), min_size=2, max_size=4).filter(lambda p: len(set(p)) > 1))
    layers = tuple(Block((Sublayer(draw(kinds[kind])), Sublayer(SwiGLU(12)))) for kind in pattern)
    return Decoder(VOCAB, heads * HEAD_DIM, (Repeat(layers),))


@st.composite
def decoders(draw: st.DrawFn) -> Decoder:
    heads = draw(st.sampled_from([1, 2, 3]))
    drawn_blocks = draw(st.lists(blocks(heads), min_size=1, max_size=2))
    ahead = tuple(draw(st.lists(blocks(heads), max_size=1)))
    position = draw(st.one_of(*stack_positions(heads).values()))
    try:
        check_shared_bias(position, (Repeat(tuple(drawn_blocks)),), ahead)
    except SpecError:  # no attention would add the bias
        position = NoPosition()
    return Decoder(
        vocab=VOCAB,
        width=heads * HEAD_DIM,
        layers=(Repeat(tuple(drawn_blocks)),),
        position=position,
        norm=draw(norms),
        tied=draw(flags),
        context=draw(st.none() | st.integers(40, LEARNED_LENGTH)),
        embedding_scale=draw(factors),
        embedding_norm=draw(st.none() | norms),
        embedding_dim=draw(st.none() | st.sampled_from([5, 16])),
        head_bias=draw(flags),
        logit_scale=draw(factors),
        softcap=draw(st.none() | st.floats(1.0, 30.0)),
        ahead=ahead,
        dropout=draw(st.sampled_from([0.0, 0.1])),
    )
