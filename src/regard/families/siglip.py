"""SigLIP (Zhai et al. 2023): images and texts in one embedding space; the loss of each pair is a sigmoid with a bias.

Images are pooled by a learned query. The embedding of a text is that of its last token. The tokenizer pads all texts to
one length, and tokens attend to the padding, so it must be part of the input.
"""

from typing import Any

from regard.families.common import dual_tower
from regard.families.common.config_reader import Config
from regard.families.common.images import read_patches, require_squares
from regard.families.common.roundtrip import check_roundtrip, require_type
from regard.kernels.attention.mask import Full
from regard.models.dual_encoder import DualEncoder
from regard.models.heads import Pooled
from regard.parts.cross_attention import CrossAttention
from regard.parts.pooling import AttentionPooling
from regard.weights.ops import Reshape, Split
from regard.weights.table import Link, Table

VISION_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
TEXT_DEFAULTS = VISION_DEFAULTS | {"vocab_size": 32000, "max_position_embeddings": 64}
POOLING_LINKS = (
    Link("head.probe", "head.pool.query", Reshape((1, 1, -1))),
    Link("head.attention.in_proj_{leaf}", tuple(f"head.pool.attention.{p}_proj.{{leaf}}" for p in "qkv"), Split()),
    Link("head.attention.out_proj.{leaf}", "head.pool.attention.o_proj.{leaf}"),
    Link("head.layernorm.{leaf}", "head.pool.norm.{leaf}"),
    Link("head.mlp.fc1.{leaf}", "head.pool.feedforward.up_proj.{leaf}"),
    Link("head.mlp.fc2.{leaf}", "head.pool.feedforward.down_proj.{leaf}"),
)


def spec(config: dict[str, Any]) -> DualEncoder:
    hf_config = Config("siglip", config)
    vision = dual_tower.read_tower(hf_config, "vision_config", VISION_DEFAULTS)
    text = dual_tower.read_tower(hf_config, "text_config", TEXT_DEFAULTS)
    vision.accept_only("vision_use_head", True)
    attention = CrossAttention(vision.integer("num_attention_heads"), bias=True)
    pooling = AttentionPooling(attention, dual_tower.read_feedforward(vision), dual_tower.read_norm(vision))
    patches = require_squares(read_patches(vision, 16, cls=False), vision.model_type)
    dim = text.integer("projection_size", text.integer("hidden_size"))
    return DualEncoder(
        image=dual_tower.read_image_encoder(vision, patches, Pooled(probe=pooling), embedding_norm=None),
        text=dual_tower.read_text_encoder(text, Full(), Pooled("last", dim, bias=True)),
        bias=0.0,
    )


def config(model: DualEncoder) -> dict[str, Any]:
    model = require_type(model, DualEncoder)
    text, vision = dual_tower.tower_config(model.text), dual_tower.tower_config(model.image)
    dim = getattr(model.text.head, "dim", None)
    settings = {
        "model_type": "siglip",
        "architectures": ["SiglipModel"],
        "text_config": {"model_type": "siglip_text_model", **text, "projection_size": dim},
        "vision_config": {"model_type": "siglip_vision_model", **vision},
    }
    return check_roundtrip("siglip", model, settings, spec)


def table(model: DualEncoder) -> Table:
    return Table(
        Link("logit_scale", "scale", Reshape((1,))),
        Link("logit_bias", "bias", Reshape((1,))),
        *(link.prefixed("text_model.", "text.") for link in dual_tower.TEXT_LINKS),
        Link("text_model.head.{leaf}", "text.head.proj.{leaf}"),
        *(link.prefixed("vision_model.", "image.") for link in (*dual_tower.vision_links(model.image), *POOLING_LINKS)),
        ignored=dual_tower.IGNORED,
    )
