"""ModernBERT (Warner et al. 2024): windows with a full layer among them, RoPE of two bases, GEGLU, no biases.

The first layer has no norm before its attention, as the embeddings end in one. `local_attention` counts both sides.
Version 4 says every how many layers one is full; version 5 lists them.
"""

from typing import Any

from regard.families.bert import ATTENTION, FEEDFORWARD, base_of
from regard.families.common.activations import OURS, THEIRS
from regard.families.common.config_reader import Config, FamilyError
from regard.families.common.encoder_heads import LABELS, Heads, architecture, ends
from regard.families.common.layer_types import FULL, SLIDING, every, listed, shortest
from regard.families.common.rope_config import rope_of, rope_parameters
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.kernels.attention.mask import Full
from regard.kernels.attention.patterns.window import Window
from regard.models.encoder import Encoder
from regard.models.heads import Classification, Dense, MaskedLM
from regard.models.stack import Repeat, tiled
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import Gated
from regard.parts.input import Tokens
from regard.parts.norm import LayerNorm, NoNorm, Norm
from regard.parts.pooling import Pool
from regard.weights.ops import Split
from regard.weights.table import Link, Table

BASES = {FULL: ("global_rope_theta", 160_000.0), SLIDING: ("local_rope_theta", 10_000.0)}
POOLS: dict[str, Pool] = {"cls": "cls", "mean": "mean"}
PACKED = tuple(f"{ATTENTION}.body.{proj}_proj.{{leaf}}" for proj in "qkv")
GATED = tuple(f"{FEEDFORWARD}.body.{proj}_proj.{{leaf}}" for proj in ("gate", "up"))


def spec(config: dict[str, Any]) -> Encoder:
    theirs = Config("modernbert", config)
    known = heads(theirs)
    return Encoder(
        Tokens(theirs.integer("vocab_size")),
        theirs.integer("hidden_size"),
        layers(theirs),
        embedding_norm=norm(theirs),
        norm=norm(theirs),
        head=known[theirs.architecture(known)],
        context=theirs.integer("max_position_embeddings", 8192),
    )


def layers(theirs: Config) -> tuple[Repeat, ...]:
    pattern = (FULL, *[SLIDING] * (every(theirs, "global_attn_every_n_layers", 3) - 1))
    first, *others = shortest(listed(theirs, "layer_types", str, pattern))
    following = tuple(block(theirs, kind, norm(theirs)) for kind in (*others, first))
    depth = theirs.integer("num_hidden_layers")
    return Repeat((block(theirs, first, NoNorm()),)), *tiled(following, depth - 1)


def block(theirs: Config, kind: str, before: Norm) -> Block:
    if kind not in BASES:
        raise FamilyError(f"modernbert: a layer is {kind!r}; there are only {', '.join(BASES)}")
    key, base = BASES[kind]
    given = {**theirs.table("rope_scaling").values, **theirs.table("rope_parameters").table(kind).values}
    settings = Config(f"modernbert: {kind}", given)
    window = Window(theirs.integer("local_attention", 128) // 2, causal=False)
    attention = Attention(
        theirs.integer("num_attention_heads"),
        position=rope_of(settings, theirs, theirs.number(key, base)),
        mask=window if kind == SLIDING else Full(),
        bias=theirs.flag("attention_bias", False),
    )
    feedforward = Gated(
        theirs.integer("intermediate_size"),
        theirs.choice("hidden_activation", OURS, "gelu"),
        bias=theirs.flag("mlp_bias", False),
    )
    return Block((Sublayer(attention, before), Sublayer(feedforward, norm(theirs))))


def norm(theirs: Config) -> LayerNorm:
    return LayerNorm(theirs.number("norm_eps", 1e-5), bias=theirs.flag("norm_bias", False))


def heads(theirs: Config) -> Heads:
    pool = theirs.choice("classifier_pooling", POOLS, "cls")
    activation = theirs.choice("classifier_activation", OURS, "gelu")
    dense = Dense(activation, norm(theirs), theirs.flag("classifier_bias", False))
    bias, tied = theirs.flag("decoder_bias", True), theirs.flag("tie_word_embeddings", True)
    return {
        "ModernBertModel": None,
        "ModernBertForMaskedLM": MaskedLM(dense, bias, tied),
        "ModernBertForSequenceClassification": Classification(theirs.labels(), pool, dense),
        "ModernBertForTokenClassification": Classification(theirs.labels(), "none", dense),
    }


def config(model: Encoder) -> dict[str, Any]:
    pairs = [bodies(block, Attention, Gated) for block in model.blocks]
    attention, feedforward = pairs[0]
    kinds = [SLIDING if isinstance(mixer.mask, Window) else FULL for mixer, _ in pairs]
    window = [mixer.mask.size for mixer, _ in pairs if isinstance(mixer.mask, Window)]
    head = model.head
    dense = getattr(head, "dense", None) or Dense("gelu", bias=False)
    written = {
        "model_type": "modernbert",
        "vocab_size": getattr(model.input, "vocab", None),
        "hidden_size": model.width,
        "intermediate_size": feedforward.hidden_dim(model.width),
        "num_hidden_layers": len(pairs),
        "num_attention_heads": attention.heads,
        "hidden_activation": THEIRS[feedforward.activation],
        "max_position_embeddings": model.context,
        "norm_eps": getattr(model.norm, "eps", None),
        "norm_bias": getattr(model.norm, "bias", None),
        "attention_bias": attention.bias,
        "mlp_bias": feedforward.bias,
        "layer_types": kinds,
        "local_attention": 2 * (window or [64])[0],
        "rope_parameters": {k: rope_parameters(mixer.position) for k, (mixer, _) in zip(kinds, pairs, strict=True)},
        "decoder_bias": head.bias if isinstance(head, MaskedLM) else True,
        "classifier_pooling": getattr(head, "pool", "cls").replace("none", "cls"),
        "classifier_bias": dense.bias,
        "classifier_activation": THEIRS[dense.activation],
        **ends(head),
    }
    theirs = Config("modernbert", written)
    written["architectures"] = [architecture(head, theirs, heads(theirs))]
    return check_roundtrip("modernbert", model, written, spec)


def table(model: Encoder) -> Table:
    base = base_of(model, "model.")
    layer, embeddings = f"{base}layers.{{i}}.", f"{base}embeddings.tok_embeddings.weight"
    return Table(
        Link(embeddings, "input.table.weight"),
        Link(f"{base}embeddings.norm.{{leaf}}", "embedding_norm.{leaf}"),
        Link(f"{layer}attn_norm.{{leaf}}", f"{ATTENTION}.norm.{{leaf}}"),
        Link(f"{layer}attn.Wqkv.{{leaf}}", PACKED, Split()),
        Link(f"{layer}attn.Wo.{{leaf}}", f"{ATTENTION}.body.o_proj.{{leaf}}"),
        Link(f"{layer}mlp_norm.{{leaf}}", f"{FEEDFORWARD}.norm.{{leaf}}"),
        Link(f"{layer}mlp.Wi.{{leaf}}", GATED, Split()),
        Link(f"{layer}mlp.Wo.{{leaf}}", f"{FEEDFORWARD}.body.down_proj.{{leaf}}"),
        Link(f"{base}final_norm.{{leaf}}", "norm.{leaf}"),
        Link("head.{part}.{leaf}", "head.dense.{part}.{leaf}"),
        Link("decoder.{leaf}", "head.vocab.{leaf}"),
        *LABELS,
        derived={"decoder.weight": embeddings},
    )
