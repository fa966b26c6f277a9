"""What CLIP and SigLIP share: two encoders of the same kind of layers, one of images and one of texts.

Each half has a config of its own, which may be there twice (`text_config_dict`); then the second one counts.
"""

from collections.abc import Mapping
from typing import Any

from regard.families.common.activations import OURS, THEIRS
from regard.families.common.config_reader import Config
from regard.families.common.images import cut, kernel
from regard.families.common.roundtrip import bodies, require_type
from regard.kernels.attention.mask import Full, Mask
from regard.models.encoder import Encoder
from regard.models.heads import Pooled
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import FeedForward
from regard.parts.input import Tokens
from regard.parts.norm import LayerNorm
from regard.parts.patches import Patches
from regard.parts.position.learned import Learned
from regard.weights.ops import Reshape
from regard.weights.table import Link

ATTENTION, FEEDFORWARD = "stack.blocks.{i}.sublayers.0", "stack.blocks.{i}.sublayers.1"
NAMES = {
    "self_attn.q_proj": f"{ATTENTION}.body.q_proj",
    "self_attn.k_proj": f"{ATTENTION}.body.k_proj",
    "self_attn.v_proj": f"{ATTENTION}.body.v_proj",
    "self_attn.out_proj": f"{ATTENTION}.body.o_proj",
    "layer_norm1": f"{ATTENTION}.norm",
    "mlp.fc1": f"{FEEDFORWARD}.body.up_proj",
    "mlp.fc2": f"{FEEDFORWARD}.body.down_proj",
    "layer_norm2": f"{FEEDFORWARD}.norm",
}
LAYERS = tuple(Link(f"encoder.layers.{{i}}.{theirs}.{{leaf}}", f"{ours}.{{leaf}}") for theirs, ours in NAMES.items())
TEXT_LINKS = (
    Link("embeddings.token_embedding.weight", "input.table.weight"),
    Link("embeddings.position_embedding.weight", "position.table.weight"),
    *LAYERS,
    Link("final_layer_norm.{leaf}", "norm.{leaf}"),
)
IGNORED = ("text_model.embeddings.position_ids", "vision_model.embeddings.position_ids")


def vision_links(model: Encoder) -> tuple[Link, ...]:
    return (
        Link("embeddings.class_embedding", "input.cls", Reshape((-1,))),
        Link("embeddings.patch_embedding.weight", "input.proj.weight", kernel(model.input)),
        Link("embeddings.patch_embedding.bias", "input.proj.bias"),
        Link("embeddings.position_embedding.weight", "position.table.weight"),
        Link("pre_layrnorm.{leaf}", "embedding_norm.{leaf}"),
        *LAYERS,
        Link("post_layernorm.{leaf}", "norm.{leaf}"),
    )


def half(theirs: Config, key: str, defaults: Mapping[str, Any]) -> Config:
    """The config of one half, with what its class takes for what it does not say."""
    found = theirs.table(f"{key}_dict" if theirs.has(f"{key}_dict") else key)
    return Config(found.model_type, {**defaults, **found.values})


def norm(theirs: Config) -> LayerNorm:
    return LayerNorm(theirs.number("layer_norm_eps"))


def feedforward(theirs: Config) -> FeedForward:
    return FeedForward(theirs.integer("intermediate_size"), theirs.choice("hidden_act", OURS))


def layers(theirs: Config, mask: Mask) -> tuple[Repeat, ...]:
    attention = Attention(theirs.integer("num_attention_heads"), mask=mask, bias=True)
    block = Block((Sublayer(attention, norm(theirs)), Sublayer(feedforward(theirs), norm(theirs))))
    return (Repeat((block,), theirs.integer("num_hidden_layers")),)


def of_images(theirs: Config, patches: Patches, head: Pooled | None, embedding_norm: LayerNorm | None) -> Encoder:
    return Encoder(
        patches,
        theirs.integer("hidden_size"),
        layers(theirs, Full()),
        Learned(patches.length),
        embedding_norm=embedding_norm,
        norm=norm(theirs),
        head=head,
    )


def of_texts(theirs: Config, mask: Mask, head: Pooled) -> Encoder:
    return Encoder(
        Tokens(theirs.integer("vocab_size")),
        theirs.integer("hidden_size"),
        layers(theirs, mask),
        Learned(theirs.integer("max_position_embeddings")),
        norm=norm(theirs),
        head=head,
    )


def written(model: Encoder) -> dict[str, Any]:
    """What either half says."""
    attention, feedforward = bodies(model.blocks[0], Attention, FeedForward)
    if isinstance(model.input, Patches):
        reads = cut(model.input)
    else:
        vocab = require_type(model.input, Tokens).vocab
        reads = {"vocab_size": vocab, "max_position_embeddings": model.position.reach}
    return reads | {
        "hidden_size": model.width,
        "intermediate_size": feedforward.hidden_dim(model.width),
        "num_hidden_layers": len(model.blocks),
        "num_attention_heads": attention.heads,
        "hidden_act": THEIRS[feedforward.activation],
        "layer_norm_eps": getattr(model.norm, "eps", None),
    }
