"""LLaVA (Liu et al. 2023): what a CLIP sees of an image, among the words of a Llama.

Patches are read below the top of the vision tower (`vision_feature_layer`), with [CLS] or without it, and projected to
the places of the image token. The text may be any decoder that names its tensors as Llama does. Files before version 5
have one more word in the names of the vision tower.
"""

from typing import Any

from regard.families import clip, family, llama
from regard.families.common.activations import OURS, THEIRS
from regard.families.common.config_reader import Config, FamilyError
from regard.families.common.dual_tower import vision_links, written
from regard.families.common.roundtrip import check_roundtrip, require_type
from regard.models.decoder import Decoder
from regard.models.interleaved import Interleaved, Projector
from regard.weights.table import Link, Table

TEXTS = {name: name for name in ("llama", "mistral", "qwen2")}
LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
STRATEGIES = {"default": False, "full": True}


def spec(config: dict[str, Any]) -> Interleaved:
    theirs = Config("llava", config)
    vision, text = theirs.table("vision_config"), theirs.table("text_config")
    vision.only("model_type", "clip_vision_model")
    tied = theirs.flag("tie_word_embeddings", False) or text.flag("tie_word_embeddings", False)
    named = text.choice("model_type", TEXTS, "llama")
    found = theirs.value("vision_feature_layer", (int, list), -2)
    model = Interleaved(
        vision=clip.seeing(Config(vision.model_type, clip.VISION | dict(vision.values))),
        decoder=family(named).spec(LLAMA | dict(text.values) | {"tie_word_embeddings": tied}),
        marker=theirs.integer("image_token_index", 32000),
        projector=Projector(
            activation=theirs.choice("projector_hidden_act", OURS, "gelu"),
            bias=theirs.flag("multimodal_projector_bias", True),
        ),
        features=(found,) if isinstance(found, int) else theirs.each("vision_feature_layer", int),
        whole=theirs.choice("vision_feature_select_strategy", STRATEGIES, "default"),
    )
    if not model.depths:
        raise FamilyError("llava: vision_feature_layer=[] names no layer to read")
    return model


def config(model: Interleaved) -> dict[str, Any]:
    model = require_type(model, Interleaved)
    features = model.features or (-1,)
    found = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": text_config(model.decoder),
        "vision_config": {"model_type": "clip_vision_model", **written(model.vision)},
        "image_token_index": model.marker,
        "image_seq_length": model.patches,
        "projector_hidden_act": THEIRS[model.projector.activation],
        "multimodal_projector_bias": model.projector.bias,
        "vision_feature_layer": features[0] if len(features) == 1 else list(features),
        "vision_feature_select_strategy": "full" if model.whole else "default",
        "tie_word_embeddings": model.decoder.tied,
    }
    return check_roundtrip("llava", model, found, spec)


def table(model: Interleaved) -> Table:
    return Table(
        *(link.prefixed("vision_tower.", "vision.") for link in vision_links(model.vision)),
        Link("multi_modal_projector.linear_1.{leaf}", "projector.up.{leaf}"),
        Link("multi_modal_projector.linear_2.{leaf}", "projector.down.{leaf}"),
        *(link.prefixed("language_model.", "decoder.") for link in llama.TABLE.links),
        ignored=("vision_tower.embeddings.position_ids", *(f"language_model.{name}" for name in llama.TABLE.ignored)),
        prefix_aliases={"vision_tower.vision_model.": "vision_tower."},
    )


def text_config(decoder: Decoder) -> dict[str, Any]:
    """The config of the first family that can express the decoder."""
    reasons = []
    for name in TEXTS:
        try:
            return family(name).config(decoder)
        except FamilyError as reason:
            reasons.append(f"{name}: {reason}")
    raise FamilyError(f"its decoder is none of {', '.join(TEXTS)} ({reasons[0]})")
