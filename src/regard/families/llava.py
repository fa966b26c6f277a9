"""LLaVA (Liu et al. 2023): the image features of a CLIP vision tower among the token embeddings of a Llama.

The features are hidden states of the vision tower (`vision_feature_layer`), with or without [CLS], projected to the
width of the decoder; they replace the embeddings of the image token. The decoder may be of any family with Llama's
tensor names. Files of transformers before version 5 have one more component in the names of the vision tower.
"""

from typing import Any

from regard.families import clip, family
from regard.families.common.config_reader import ACTIVATION_NAMES, Config, FamilyError
from regard.families.common.decoder import LLAMA_TABLE
from regard.families.common.dual_tower import tower_config, vision_links
from regard.families.common.roundtrip import check_roundtrip, require_type
from regard.models.decoder import Decoder
from regard.models.interleaved import Interleaved, Projector
from regard.weights.table import Link, Table

DECODERS = {name: name for name in ("llama", "mistral", "qwen2")}
LLAMA_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
STRATEGIES = {"default": False, "full": True}  # whether [CLS] is included


def spec(config: dict[str, Any]) -> Interleaved:
    hf_config = Config("llava", config)
    vision, text = hf_config.nested("vision_config"), hf_config.nested("text_config")
    vision.accept_only("model_type", "clip_vision_model")
    tied = hf_config.flag("tie_word_embeddings", False) or text.flag("tie_word_embeddings", False)
    decoder = family(text.choice("model_type", DECODERS, "llama"))
    features = hf_config.value("vision_feature_layer", (int, list), -2)
    model = Interleaved(
        vision=clip.read_vision(Config(vision.model_type, clip.VISION_DEFAULTS | dict(vision.values))),
        decoder=decoder.spec(LLAMA_DEFAULTS | dict(text.values) | {"tie_word_embeddings": tied}),
        marker=hf_config.integer("image_token_index", 32000),
        projector=Projector(
            activation=hf_config.activation("projector_hidden_act", "gelu"),
            bias=hf_config.flag("multimodal_projector_bias", True),
        ),
        features=(features,) if isinstance(features, int) else hf_config.list_of(int, "vision_feature_layer"),
        whole=hf_config.choice("vision_feature_select_strategy", STRATEGIES, "default"),
    )
    if not model.depths:
        raise hf_config.error("vision_feature_layer", [], "must name at least one layer")
    return model


def config(model: Interleaved) -> dict[str, Any]:
    model = require_type(model, Interleaved)
    features = model.features or (-1,)
    settings = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": text_config(model.decoder),
        "vision_config": {"model_type": "clip_vision_model", **tower_config(model.vision)},
        "image_token_index": model.marker,
        "image_seq_length": model.patches,
        "projector_hidden_act": ACTIVATION_NAMES[model.projector.activation],
        "multimodal_projector_bias": model.projector.bias,
        "vision_feature_layer": features[0] if len(features) == 1 else list(features),
        "vision_feature_select_strategy": "full" if model.whole else "default",
        "tie_word_embeddings": model.decoder.tied,
    }
    return check_roundtrip("llava", model, settings, spec)


def table(model: Interleaved) -> Table:
    return Table(
        *(link.prefixed("vision_tower.", "vision.") for link in vision_links(model.vision)),
        Link("multi_modal_projector.linear_1.{leaf}", "projector.up.{leaf}"),
        Link("multi_modal_projector.linear_2.{leaf}", "projector.down.{leaf}"),
        *(link.prefixed("language_model.", "decoder.") for link in LLAMA_TABLE.links),
        ignored=("vision_tower.embeddings.position_ids", *(f"language_model.{name}" for name in LLAMA_TABLE.ignored)),
        prefix_aliases={"vision_tower.vision_model.": "vision_tower."},
    )


def text_config(decoder: Decoder) -> dict[str, Any]:
    """The config of the first family that can express the decoder."""
    reasons = []
    for name in DECODERS:
        try:
            return family(name).config(decoder)
        except FamilyError as reason:
            reasons.append(f"{name}: {reason}")
    raise FamilyError(f"the decoder cannot be expressed by any of {', '.join(DECODERS)} ({reasons[0]})")
