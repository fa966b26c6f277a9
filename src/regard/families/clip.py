"""CLIP (Radford et al. 2021): a vision transformer and a causal text transformer with a common embedding space.

The embedding of a text is that of its end token. The first published configs have the id 2 for this token; its actual
id is the highest of the vocabulary.
"""

from typing import Any

from regard.families.common import dual_tower
from regard.families.common.config_reader import Config, FamilyError
from regard.families.common.images import read_patches, require_squares
from regard.families.common.roundtrip import check_roundtrip, require_type
from regard.kernels.attention.mask import Causal
from regard.models.dual_encoder import DualEncoder
from regard.models.encoder import Encoder
from regard.models.heads import Pooled
from regard.weights.table import Link, Table

COMMON_DEFAULTS = {"num_hidden_layers": 12, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
VISION_DEFAULTS = COMMON_DEFAULTS | {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
TEXT_DEFAULTS = COMMON_DEFAULTS | {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "vocab_size": 49408,
    "max_position_embeddings": 77,
    "eos_token_id": 49407,
}


def spec(config: dict[str, Any]) -> DualEncoder:
    hf_config = Config("clip", config)
    vision = dual_tower.read_tower(hf_config, "vision_config", VISION_DEFAULTS)
    text = dual_tower.read_tower(hf_config, "text_config", TEXT_DEFAULTS)
    dim, end = hf_config.integer("projection_dim", 512), text.integer("eos_token_id")
    return DualEncoder(
        image=read_vision(vision, Pooled("cls", dim)),
        text=dual_tower.read_text_encoder(text, Causal(), Pooled("last", dim)),
        end=text.integer("vocab_size") - 1 if end == 2 else end,
    )


def read_vision(hf_config: Config, head: Pooled | None = None) -> Encoder:
    """The vision tower; `hf_config` is complete, defaults included."""
    patches = require_squares(read_patches(hf_config, 32, bias=False), hf_config.model_type)
    return dual_tower.read_image_encoder(hf_config, patches, head, embedding_norm=dual_tower.read_norm(hf_config))


def config(model: DualEncoder) -> dict[str, Any]:
    model = require_type(model, DualEncoder)
    if model.end is None:
        raise FamilyError("transformers' clip finds the end of a text by its end token; set `end` of the dual encoder")
    text, vision = dual_tower.tower_config(model.text), dual_tower.tower_config(model.image)
    settings = {
        "model_type": "clip",
        "architectures": ["CLIPModel"],
        "projection_dim": getattr(model.image.head, "dim", None),
        "text_config": {"model_type": "clip_text_model", **text, "eos_token_id": model.end},
        "vision_config": {"model_type": "clip_vision_model", **vision},
    }
    return check_roundtrip("clip", model, settings, spec)


def table(model: DualEncoder) -> Table:
    return Table(
        Link("logit_scale", "scale"),
        *(link.prefixed("text_model.", "text.") for link in dual_tower.TEXT_LINKS),
        Link("text_projection.weight", "text.head.proj.weight"),
        *(link.prefixed("vision_model.", "image.") for link in dual_tower.vision_links(model.image)),
        Link("visual_projection.weight", "image.head.proj.weight"),
        ignored=dual_tower.IGNORED,
    )
