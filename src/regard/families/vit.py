"""The vision transformer (Dosovitskiy et al. 2020): patches and [CLS], learned positions, pre-norm blocks.

`ViTModel` has a pooler: a dense layer on [CLS]. DeiT and DINOv2 call these functions with the parts in which they
differ.
Dropout is an option of training and is not converted.
"""

from typing import Any

from regard.families.common.config_reader import ACTIVATION_NAMES, Config
from regard.families.common.encoder_heads import LABELS, Heads, check_encoder_roundtrip, read_classifier
from regard.families.common.images import image_config, patch_kernel, read_patches
from regard.families.common.names import ATTENTION, FEEDFORWARD, attention_links, module_links
from regard.families.common.roundtrip import bodies
from regard.kernels.attention.mask import Full
from regard.models.encoder import Encoder
from regard.models.heads import Dense, Pooled
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import FeedForward
from regard.parts.norm import LayerNorm
from regard.parts.patches import Patches
from regard.parts.position.learned import Learned
from regard.weights.ops import Reshape
from regard.weights.table import Link, Table

LAYER = {
    "layernorm_before": f"{ATTENTION}.norm",
    "layernorm_after": f"{FEEDFORWARD}.norm",
    "intermediate.dense": f"{FEEDFORWARD}.body.up_proj",
    "output.dense": f"{FEEDFORWARD}.body.down_proj",
}
POOLER = Link("pooler.dense.{leaf}", "head.dense.dense.{leaf}")


def spec(config: dict[str, Any]) -> Encoder:
    hf_config = Config("vit", config)
    return read_encoder(hf_config, read_patches(hf_config, 16), read_block(hf_config), heads(hf_config))


def config(model: Encoder) -> dict[str, Any]:
    return check_encoder_roundtrip(model, common_config("vit", model), spec, heads)


def table(model: Encoder) -> Table:
    return Table(*encoder_links(model, "vit.", LAYER), POOLER, *LABELS)


def heads(hf_config: Config) -> Heads:
    return {"ViTModel": read_pooler(hf_config), "ViTForImageClassification": read_classifier(hf_config)}


def read_pooler(hf_config: Config) -> Pooled:
    hf_config.accept_only("pooler_output_size", hf_config.integer("hidden_size", 768))
    return Pooled("cls", dense=Dense(hf_config.activation("pooler_act", "tanh")), normalize=False)


def read_attention(hf_config: Config) -> Attention:
    width, heads = hf_config.integer("hidden_size", 768), hf_config.integer("num_attention_heads", 12)
    head_dim = hf_config.integer("head_dim", width // max(heads, 1))
    bias = hf_config.flag("qkv_bias", True)
    return Attention(heads, head_dim=head_dim, mask=Full(), bias=bias, out_bias=True)


def read_block(hf_config: Config) -> Block:
    norm = LayerNorm(hf_config.number("layer_norm_eps", 1e-12))
    feedforward = FeedForward(hf_config.integer("intermediate_size", 3072), hf_config.activation("hidden_act", "gelu"))
    return Block((Sublayer(read_attention(hf_config), norm), Sublayer(feedforward, norm)))


def read_encoder(hf_config: Config, patches: Patches, block: Block, heads: Heads) -> Encoder:
    return Encoder(
        patches,
        hf_config.integer("hidden_size", 768),
        (Repeat((block,), hf_config.integer("num_hidden_layers", 12)),),
        Learned(patches.length),
        norm=block.sublayers[0].norm,
        head=heads[hf_config.architecture(heads)],
    )


def common_config(model_type: str, model: Encoder) -> dict[str, Any]:
    """The keys that ViT and DeiT have."""
    attention, feedforward = bodies(model.blocks[0], Attention, FeedForward)
    dense = model.head.dense if isinstance(model.head, Pooled) else None
    return shape_config(model_type, model, attention) | {
        "intermediate_size": feedforward.hidden_dim(model.width),
        "hidden_act": ACTIVATION_NAMES[feedforward.activation],
        **({"pooler_act": ACTIVATION_NAMES[dense.activation]} if dense else {}),
    }


def shape_config(model_type: str, model: Encoder, attention: Attention) -> dict[str, Any]:
    """The keys of images, depth, width and attention, which DINOv2 has too."""
    return {
        "model_type": model_type,
        **image_config(model.input),
        "hidden_size": model.width,
        "num_hidden_layers": len(model.blocks),
        "num_attention_heads": attention.heads,
        "head_dim": attention.sizes(model.width)[2],
        "qkv_bias": attention.bias,
        "layer_norm_eps": getattr(model.norm, "eps", None),
    }


def encoder_links(model: Encoder, base: str, names: dict[str, str], *extra_links: Link) -> tuple[Link, ...]:
    """The encoder without its head; `names` maps the modules of a layer, `base` is the prefix in classifiers."""
    layer = "encoder.layer.{i}"
    links = (
        Link("embeddings.cls_token", "input.cls", Reshape((1, 1, -1))),
        Link("embeddings.position_embeddings", "position.table.weight", Reshape((1, -1, model.width))),
        Link("embeddings.patch_embeddings.projection.weight", "input.proj.weight", patch_kernel(model.input)),
        Link("embeddings.patch_embeddings.projection.bias", "input.proj.bias"),
        *attention_links(f"{layer}.attention", "attention.query", "attention.key", "attention.value", "output.dense"),
        *module_links(layer, names),
        Link("layernorm.{leaf}", "norm.{leaf}"),
        *extra_links,
    )
    return tuple(link.prefixed("" if isinstance(model.head, Pooled) else base, "") for link in links)
