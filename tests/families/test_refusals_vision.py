"""Families of vision models refuse unsupported settings, and specs that they cannot express."""

from dataclasses import replace
from typing import Any

import pytest

from regard.families import FamilyError, family
from regard.kernels.attention.mask import Causal
from regard.models.heads import Classification
from regard.models.stack import Repeat
from regard.parts.block import Block
from regard.spec import SpecError
from tests.families.cases.vision import DINO, VIT, dual_config, llava_config

SETTINGS = {
    "vit": VIT,
    "deit": VIT,
    "dinov2": DINO,
    "clip": dual_config(),
    "siglip": dual_config({"projection_size": 24}),
    "llava": llava_config(),
}


def read_spec(model_type: str, **changes: Any) -> Any:
    return family(model_type).spec(SETTINGS[model_type] | changes)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        (
            "vit",
            {"architectures": ["ViTForMaskedImageModeling"]},
            "architectures='ViTForMaskedImageModeling' is not supported",
        ),
        ("vit", {"pooler_output_size": 7}, "pooler_output_size=7 is not supported, only 24 is"),
        ("vit", {"hidden_act": "mish"}, "hidden_act='mish' is not supported"),
        ("vit", {"image_size": [8, 8, 8]}, r"image_size=\[8, 8, 8\] must be a number, or height and width"),
        ("vit", {"image_size": "8"}, "image_size='8' must be int or list or tuple"),
        ("vit", {"patch_size": [4, 4.5]}, "patch_size=.* must be a list of int"),
        (
            "deit",
            {"architectures": ["ViTModel"]},
            "architectures='ViTModel' is not supported; choose one of DeiTModel, DeiTForImage",
        ),
        ("dinov2", {"image_size": [8, 12]}, "image_size=.* must be square"),
        ("clip", dual_config({"eos_token_id": [1, 2]}), r"text_config: eos_token_id=\[1, 2\] must be int"),
        ("clip", dual_config({"hidden_act": "mish"}), "text_config: hidden_act='mish'"),
        ("clip", dual_config(vision={"patch_size": [4, 2]}), "vision_config: patch_size=.* must be square"),
        ("clip", {"text_config": 3}, "text_config=3 must be dict"),
        (
            "siglip",
            dual_config(vision={"vision_use_head": False}),
            "vision_config: vision_use_head=False is not supported",
        ),
        ("llava", {"vision_config": {"model_type": "siglip_vision_model"}}, "model_type='siglip_vision_model'"),
        ("llava", llava_config({"model_type": "gpt2"}), "text_config: model_type='gpt2' is not supported"),
        ("llava", {"vision_feature_layer": []}, "must name at least one layer"),
        ("llava", {"vision_feature_layer": ["top"]}, "vision_feature_layer=.* must be a list of int"),
        ("llava", {"vision_feature_select_strategy": "cls"}, "vision_feature_select_strategy='cls' is not supported"),
        ("llava", {"projector_hidden_act": "mish"}, "projector_hidden_act='mish'"),
    ],
)
def test_unsupported_settings_are_refused(model_type: str, changes: dict, message: str) -> None:
    with pytest.raises(FamilyError, match=f"^{model_type}: .*{message}"):
        read_spec(model_type, **changes)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("vit", {"patch_size": 0}, "patches: size=.* must be positive"),
        ("vit", {"patch_size": 16}, "shorter than a patch"),
        ("vit", {"num_hidden_layers": 0}, "times=0 must be positive"),
        ("clip", dual_config({"num_attention_heads": 3}, projection_dim=4), "width=16 is not divisible by heads=3"),
        ("siglip", dual_config(), "image embeddings have 24 dimensions and text embeddings 16"),
        ("llava", {"image_token_index": 1000}, "marker=1000 is not in the vocabulary"),
        ("llava", {"vision_feature_layer": 3}, "exceeds the 2 blocks"),
    ],
)
def test_impossible_sizes_are_refused(model_type: str, changes: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        read_spec(model_type, **changes).build()


def test_a_config_with_many_layers_is_read_without_building_them() -> None:
    """Nothing is built before the depth is compared with the files."""
    deep = {"num_hidden_layers": 10_000}
    deep_changes = {
        "vit": deep,
        "deit": deep,
        "dinov2": deep,
        "clip": dual_config(vision=deep),
        "llava": llava_config(deep, deep),
    }
    for model_type, changes in deep_changes.items():
        assert family(model_type).table(read_spec(model_type, **changes)).links


def test_text_config_dict_overrides_text_config() -> None:
    model = read_spec(
        "clip", **dual_config({"num_hidden_layers": 5}), text_config_dict={"vocab_size": 7, "hidden_size": 8}
    )
    assert (model.text.input.vocab, model.text.width, len(model.text.blocks)) == (7, 8, 12)


def test_omitted_keys_have_the_defaults_of_transformers() -> None:
    base = family("vit").spec({})
    assert (base.width, base.input.grid, len(base.blocks)) == (768, (14, 14), 12)
    assert family("dinov2").spec({}).input.size == (14, 14)
    assert (
        family("clip").spec({}).text.position.max_positions,
        family("siglip").spec({}).text.position.max_positions,
    ) == (77, 64)
    decoder = family("llava").spec({"text_config": {"vocab_size": 32064}, "vision_config": {}}).decoder
    assert (decoder.width, len(decoder.blocks), decoder.vocab) == (4096, 32, 32064)


VIT_SPEC, CLIP_SPEC, LLAVA_SPEC = read_spec("vit"), read_spec("clip"), read_spec("llava")


def block_with(**changes: Any) -> Block:
    mixer, feedforward = VIT_SPEC.blocks[0].sublayers
    return Block((replace(mixer, body=replace(mixer.body, **changes)), feedforward))


@pytest.mark.parametrize(
    ("model_type", "model", "message"),
    [
        ("vit", replace(VIT_SPEC, head=Classification(3, "mean")), "no vit class has the head Classification"),
        ("vit", replace(VIT_SPEC, norm=None), "layer_norm_eps|encoder.norm=None"),
        ("vit", replace(VIT_SPEC, layers=(Repeat((block_with(mask=Causal()),)),)), r"mask=Causal\(\), only Full"),
        ("vit", replace(VIT_SPEC, layers=(Repeat((block_with(kv_heads=2),)),)), "kv_heads=2, only 4"),
        ("vit", CLIP_SPEC.text, "the model has Tokens.*; this family has Patches"),
        ("deit", VIT_SPEC, "registers=0, only 1"),
        ("dinov2", VIT_SPEC, "no dinov2 class has the head"),
        ("clip", VIT_SPEC, "the model has Encoder.*; this family has DualEncoder"),
        ("clip", replace(CLIP_SPEC, end=2), "end=2, only 96"),
        ("clip", replace(CLIP_SPEC, end=None), "set `end` of the dual encoder"),
        ("clip", replace(CLIP_SPEC, bias=0.0), "bias=0.0, only None"),
        ("siglip", CLIP_SPEC, "dual_encoder"),
        ("llava", replace(LLAVA_SPEC, features=()), r"features=\(\), only \(-1,\)"),
        (
            "llava",
            replace(LLAVA_SPEC, decoder=replace(LLAVA_SPEC.decoder, softcap=3.0)),
            "cannot be expressed by any of llama",
        ),
    ],
)
def test_specs_that_the_class_cannot_express_are_refused(model_type: str, model: Any, message: str) -> None:
    with pytest.raises(FamilyError, match=message):
        family(model_type).config(model)


def test_initial_values_of_parameters_are_not_exported() -> None:
    assert family("clip").config(replace(CLIP_SPEC, temperature=1 / 3)) == family("clip").config(CLIP_SPEC)
