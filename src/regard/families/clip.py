"""CLIP (Radford et al. 2021): a vision transformer and a causal text transformer that meet in one space.

A text is read at its end token, wherever that stands. The first configs said 2 for its id and meant the highest one.
"""

from typing import Any

from regard.families.common.config_reader import Config, FamilyError
from regard.families.common.dual_tower import (
    IGNORED,
    TEXT_LINKS,
    half,
    norm,
    of_images,
    of_texts,
    vision_links,
    written,
)
from regard.families.common.images import only_squares, patches
from regard.families.common.roundtrip import check_roundtrip, require_type
from regard.kernels.attention.mask import Causal
from regard.models.dual_encoder import DualEncoder
from regard.models.encoder import Encoder
from regard.models.heads import Pooled
from regard.weights.table import Link, Table

BOTH = {"num_hidden_layers": 12, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
VISION = BOTH | {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
TEXT = BOTH | {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "vocab_size": 49408,
    "max_position_embeddings": 77,
    "eos_token_id": 49407,
}


def spec(config: dict[str, Any]) -> DualEncoder:
    theirs = Config("clip", config)
    text, dim = half(theirs, "text_config", TEXT), theirs.integer("projection_dim", 512)
    end = text.integer("eos_token_id")
    return DualEncoder(
        image=seeing(half(theirs, "vision_config", VISION), Pooled("cls", dim)),
        text=of_texts(text, Causal(), Pooled("last", dim)),
        end=text.integer("vocab_size") - 1 if end == 2 else end,
    )


def config(model: DualEncoder) -> dict[str, Any]:
    model = require_type(model, DualEncoder)
    if model.end is None:
        raise FamilyError("transformers' clip finds where a text ends by a token; give the dual encoder its end")
    found = {
        "model_type": "clip",
        "architectures": ["CLIPModel"],
        "projection_dim": getattr(model.image.head, "dim", None),
        "text_config": {"model_type": "clip_text_model", **written(model.text), "eos_token_id": model.end},
        "vision_config": {"model_type": "clip_vision_model", **written(model.image)},
    }
    return check_roundtrip("clip", model, found, spec)


def table(model: DualEncoder) -> Table:
    return Table(
        Link("logit_scale", "scale"),
        *(link.prefixed("text_model.", "text.") for link in TEXT_LINKS),
        Link("text_projection.weight", "text.head.proj.weight"),
        *(link.prefixed("vision_model.", "image.") for link in vision_links(model.image)),
        Link("visual_projection.weight", "image.head.proj.weight"),
        ignored=IGNORED,
    )


def seeing(theirs: Config, head: Pooled | None = None) -> Encoder:
    """The half that looks; `theirs` says all that its class would."""
    squares = only_squares(patches(theirs, 32, bias=False), theirs.model_type)
    return of_images(theirs, squares, head, embedding_norm=norm(theirs))
