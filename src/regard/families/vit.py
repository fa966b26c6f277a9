"""The vision transformer (Dosovitskiy et al. 2020): patches and [CLS], learned positions, a LayerNorm before each body.

The plain `ViTModel` ends in a pooler: [CLS] through one more layer. Its relatives take from here what they share.
Dropout is a choice of the training run.
"""

from typing import Any

from regard.families.common.activations import OURS, THEIRS
from regard.families.common.config_reader import Config
from regard.families.common.encoder_heads import LABELS, Heads, architecture, ends
from regard.families.common.images import cut, kernel, patches
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.kernels.attention.mask import Full
from regard.models.encoder import Encoder
from regard.models.heads import Classification, Dense, Head, Pooled
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import FeedForward
from regard.parts.norm import LayerNorm
from regard.parts.patches import Patches
from regard.parts.position.learned import Learned
from regard.weights.ops import Reshape
from regard.weights.table import Link, Table

ATTENTION, FEEDFORWARD = "stack.blocks.{i}.sublayers.0", "stack.blocks.{i}.sublayers.1"
LOOK = {
    "attention.attention.query": f"{ATTENTION}.body.q_proj",
    "attention.attention.key": f"{ATTENTION}.body.k_proj",
    "attention.attention.value": f"{ATTENTION}.body.v_proj",
    "attention.output.dense": f"{ATTENTION}.body.o_proj",
}
LAYER = LOOK | {
    "layernorm_before": f"{ATTENTION}.norm",
    "layernorm_after": f"{FEEDFORWARD}.norm",
    "intermediate.dense": f"{FEEDFORWARD}.body.up_proj",
    "output.dense": f"{FEEDFORWARD}.body.down_proj",
}
POOLER = Link("pooler.dense.{leaf}", "head.dense.dense.{leaf}")


def spec(config: dict[str, Any]) -> Encoder:
    theirs = Config("vit", config)
    return encoder(theirs, patches(theirs, 16), layer(theirs), heads(theirs))


def config(model: Encoder) -> dict[str, Any]:
    written = {"model_type": "vit", **settings(model)}
    theirs = Config("vit", written)
    return check_roundtrip(
        "vit", model, written | {"architectures": [architecture(model.head, theirs, heads(theirs))]}, spec
    )


def table(model: Encoder) -> Table:
    return Table(*links(model, "vit.", LAYER), POOLER, *LABELS)


def heads(theirs: Config) -> Heads:
    return {"ViTModel": pooler(theirs), "ViTForImageClassification": Classification(theirs.labels())}


def pooler(theirs: Config) -> Pooled:
    theirs.only("pooler_output_size", theirs.integer("hidden_size", 768))
    return Pooled("cls", dense=Dense(theirs.choice("pooler_act", OURS, "tanh")), normalize=False)


def attention(theirs: Config) -> Attention:
    width, heads = theirs.integer("hidden_size", 768), theirs.integer("num_attention_heads", 12)
    head_dim = theirs.integer("head_dim", width // max(heads, 1))
    bias = theirs.flag("qkv_bias", True)
    return Attention(heads, head_dim=head_dim, mask=Full(), bias=bias, out_bias=True)


def layer(theirs: Config) -> Block:
    norm = LayerNorm(theirs.number("layer_norm_eps", 1e-12))
    feedforward = FeedForward(theirs.integer("intermediate_size", 3072), theirs.choice("hidden_act", OURS, "gelu"))
    return Block((Sublayer(attention(theirs), norm), Sublayer(feedforward, norm)))


def encoder(theirs: Config, patches: Patches, block: Block, heads: Heads) -> Encoder:
    return Encoder(
        patches,
        theirs.integer("hidden_size", 768),
        (Repeat((block,), theirs.integer("num_hidden_layers", 12)),),
        Learned(patches.length),
        norm=block.sublayers[0].norm,
        head=heads[theirs.architecture(heads)],
    )


def settings(model: Encoder) -> dict[str, Any]:
    attention, feedforward = bodies(model.blocks[0], Attention, FeedForward)
    return {
        **looks(model, attention),
        "intermediate_size": feedforward.hidden_dim(model.width),
        "hidden_act": THEIRS[feedforward.activation],
        **pooled(model.head),
        **ends(model.head),
    }


def looks(model: Encoder, attention: Attention) -> dict[str, Any]:
    """What ViT and its relatives all say of images and attention."""
    return {
        **cut(model.input),
        "hidden_size": model.width,
        "num_hidden_layers": len(model.blocks),
        "num_attention_heads": attention.heads,
        "head_dim": attention.sizes(model.width)[2],
        "qkv_bias": attention.bias,
        "layer_norm_eps": getattr(model.norm, "eps", None),
    }


def pooled(head: Head | None) -> dict[str, Any]:
    dense = head.dense if isinstance(head, Pooled) else None
    return {"pooler_act": THEIRS[dense.activation]} if dense else {}


def links(model: Encoder, base: str, layer: dict[str, str], *more: Link) -> tuple[Link, ...]:
    """The encoder's names, which `base` stands before where it has a head of its own; `more` of them, if there are."""
    found = (
        Link("embeddings.cls_token", "input.cls", Reshape((1, 1, -1))),
        Link("embeddings.position_embeddings", "position.table.weight", Reshape((1, -1, model.width))),
        Link("embeddings.patch_embeddings.projection.weight", "input.proj.weight", kernel(model.input)),
        Link("embeddings.patch_embeddings.projection.bias", "input.proj.bias"),
        *(Link(f"encoder.layer.{{i}}.{theirs}.{{leaf}}", f"{ours}.{{leaf}}") for theirs, ours in layer.items()),
        Link("layernorm.{leaf}", "norm.{leaf}"),
        *more,
    )
    return tuple(link.prefixed("" if isinstance(model.head, Pooled) else base, "") for link in found)
