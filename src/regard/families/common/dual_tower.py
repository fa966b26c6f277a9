"""CLIP and SigLIP: an encoder of images and an encoder of text with the same kind of layers.

The config of a tower may be present twice; the second one (`text_config_dict`) then has priority.
"""

from collections.abc import Mapping
from typing import Any

from regard.families.common.config_reader import ACTIVATION_NAMES, Config
from regard.families.common.images import image_config, patch_kernel
from regard.families.common.names import ATTENTION, FEEDFORWARD, attention_links, module_links
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

LAYER = "encoder.layers.{i}"
NAMES = {
    "layer_norm1": f"{ATTENTION}.norm",
    "mlp.fc1": f"{FEEDFORWARD}.body.up_proj",
    "mlp.fc2": f"{FEEDFORWARD}.body.down_proj",
    "layer_norm2": f"{FEEDFORWARD}.norm",
}
LAYER_LINKS = (
    *attention_links(f"{LAYER}.self_attn", "q_proj", "k_proj", "v_proj", "out_proj"),
    *module_links(LAYER, NAMES),
)
TEXT_LINKS = (
    Link("embeddings.token_embedding.weight", "input.table.weight"),
    Link("embeddings.position_embedding.weight", "position.table.weight"),
    *LAYER_LINKS,
    Link("final_layer_norm.{leaf}", "norm.{leaf}"),
)
IGNORED = ("text_model.embeddings.position_ids", "vision_model.embeddings.position_ids")


def vision_links(model: Encoder) -> tuple[Link, ...]:
    return (
        Link("embeddings.class_embedding", "input.cls", Reshape((-1,))),
        Link("embeddings.patch_embedding.weight", "input.proj.weight", patch_kernel(model.input)),
        Link("embeddings.patch_embedding.bias", "input.proj.bias"),
        Link("embeddings.position_embedding.weight", "position.table.weight"),
        Link("pre_layrnorm.{leaf}", "embedding_norm.{leaf}"),
        *LAYER_LINKS,
        Link("post_layernorm.{leaf}", "norm.{leaf}"),
    )


def read_tower(hf_config: Config, key: str, defaults: Mapping[str, Any]) -> Config:
    """The config of one tower, completed by the defaults of its class."""
    found = hf_config.nested(f"{key}_dict" if hf_config.has(f"{key}_dict") else key)
    return Config(found.model_type, {**defaults, **found.values})


def read_norm(hf_config: Config) -> LayerNorm:
    return LayerNorm(hf_config.number("layer_norm_eps"))


def read_feedforward(hf_config: Config) -> FeedForward:
    return FeedForward(hf_config.integer("intermediate_size"), hf_config.activation("hidden_act"))


def read_layers(hf_config: Config, mask: Mask) -> tuple[Repeat, ...]:
    attention, norm = Attention(hf_config.integer("num_attention_heads"), mask=mask, bias=True), read_norm(hf_config)
    block = Block((Sublayer(attention, norm), Sublayer(read_feedforward(hf_config), norm)))
    return (Repeat((block,), hf_config.integer("num_hidden_layers")),)


def read_image_encoder(
    hf_config: Config, patches: Patches, head: Pooled | None, embedding_norm: LayerNorm | None
) -> Encoder:
    return Encoder(
        patches,
        hf_config.integer("hidden_size"),
        read_layers(hf_config, Full()),
        Learned(patches.length),
        embedding_norm=embedding_norm,
        norm=read_norm(hf_config),
        head=head,
    )


def read_text_encoder(hf_config: Config, mask: Mask, head: Pooled) -> Encoder:
    return Encoder(
        Tokens(hf_config.integer("vocab_size")),
        hf_config.integer("hidden_size"),
        read_layers(hf_config, mask),
        Learned(hf_config.integer("max_position_embeddings")),
        norm=read_norm(hf_config),
        head=head,
    )


def tower_config(model: Encoder) -> dict[str, Any]:
    """The keys that both towers have, and those of the tower's input."""
    attention, feedforward = bodies(model.blocks[0], Attention, FeedForward)
    if isinstance(model.input, Patches):
        inputs = image_config(model.input)
    else:
        vocab = require_type(model.input, Tokens).vocab
        inputs = {"vocab_size": vocab, "max_position_embeddings": model.position.max_positions}
    return inputs | {
        "hidden_size": model.width,
        "intermediate_size": feedforward.hidden_dim(model.width),
        "num_hidden_layers": len(model.blocks),
        "num_attention_heads": attention.heads,
        "hidden_act": ACTIVATION_NAMES[feedforward.activation],
        "layer_norm_eps": getattr(model.norm, "eps", None),
    }
