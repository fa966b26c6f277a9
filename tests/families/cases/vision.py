"""Vision encoders (ViT, DeiT, DINOv2), dual encoders (CLIP, SigLIP) and LLaVA."""

from tests.families.cases import LARGE_INIT, VOCAB, Cases

VIT = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "image_size": 12,
    "patch_size": 4,
    **LARGE_INIT,
}
DINO = {key: value for key, value in VIT.items() if key != "intermediate_size"} | {"layerscale_value": 0.5}
END_TOKEN = VOCAB - 1
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 26,
    "initializer_factor": 2.0,
    "bos_token_id": 0,
    "eos_token_id": END_TOKEN,
}
IMAGE = VIT | {"initializer_factor": 2.0}
IMAGE_TOKEN = 5
LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 96,
    "bos_token_id": None,
    "eos_token_id": None,
    **LARGE_INIT,
}
CLIP_VISION = IMAGE | {"model_type": "clip_vision_model"}


def make_cases(model: str, base: dict, changes: dict[str, dict]) -> Cases:
    return {f"{model}: {name}": (model, base | change) for name, change in changes.items()}


def dual_config(text: dict | None = None, vision: dict | None = None, **settings) -> dict:
    return {"text_config": TEXT | (text or {}), "vision_config": IMAGE | (vision or {}), **settings}


def llava_config(text: dict | None = None, vision: dict | None = None, **settings) -> dict:
    nested = {"text_config": LLAMA | (text or {}), "vision_config": CLIP_VISION | (vision or {})}
    return {**nested, "image_token_index": IMAGE_TOKEN, "image_seq_length": 9, **settings}


SHAPES = {
    "square": {},
    "one layer, one head": {"num_hidden_layers": 1, "num_attention_heads": 1},
    "explicit head_dim, no biases": {"head_dim": 5, "qkv_bias": False},
}
ODD = {"not square, remaining pixels, one channel": {"image_size": [9, 14], "patch_size": [3, 4], "num_channels": 1}}
ENCODERS: Cases = {
    **make_cases("ViTModel", VIT, SHAPES | ODD | {"another pooler": {"pooler_act": "gelu", "hidden_act": "relu"}}),
    **make_cases(
        "ViTForImageClassification", VIT | {"num_labels": 3}, SHAPES | ODD | {"two labels": {"num_labels": 2}}
    ),
    **make_cases("DeiTModel", VIT, SHAPES | ODD),
    **make_cases("DeiTForImageClassification", VIT | {"num_labels": 5}, SHAPES | ODD),
    **make_cases("DeiTForImageClassificationWithTeacher", VIT | {"num_labels": 3}, SHAPES | ODD),
    **make_cases(
        "Dinov2Model",
        DINO,
        SHAPES | {"gated": {"use_swiglu_ffn": True, "mlp_ratio": 2}, "no mask token": {"use_mask_token": False}},
    ),
    **make_cases(
        "Dinov2ForImageClassification",
        DINO | {"num_labels": 3},
        {
            "gated": {"use_swiglu_ffn": True},
            **SHAPES,
            "remaining pixels": {"image_size": 11, "hidden_act": "gelu_pytorch_tanh"},
        },
    ),
}
DUAL_ENCODERS: Cases = {
    **make_cases(
        "CLIPModel",
        {},
        {
            "two widths": dual_config(projection_dim=10),
            "end token of the first configs": dual_config({"eos_token_id": 2}, projection_dim=24),
            "one layer each, gelu, remaining pixels": dual_config(
                {"num_hidden_layers": 1, "hidden_act": "gelu", "num_attention_heads": 1},
                {"num_hidden_layers": 1, "hidden_act": "relu", "image_size": 15, "num_channels": 2},
                projection_dim=3,
            ),
        },
    ),
    **make_cases(
        "SiglipModel",
        {},
        {
            "two widths": dual_config({"projection_size": 24}),
            "one width": dual_config({"hidden_size": 24, "num_attention_heads": 3}, {"image_size": 14}),
            "one layer each, another epsilon": dual_config(
                {"num_hidden_layers": 1, "projection_size": 24, "layer_norm_eps": 1e-3},
                {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_act": "gelu", "layer_norm_eps": 1e-2},
            ),
        },
    ),
}
INTERLEAVED: Cases = make_cases(
    "LlavaForConditionalGeneration",
    {},
    {
        "penultimate layer": llava_config(),
        "with [CLS], last layer, tied": llava_config(
            {"tie_word_embeddings": True, "num_key_value_heads": 1},
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
            image_seq_length=10,
        ),
        "two layers, no biases": llava_config(
            {"num_key_value_heads": 2, "head_dim": 12},
            vision_feature_layer=[-2, 2],
            multimodal_projector_bias=False,
            projector_hidden_act="relu",
        ),
        "mistral decoder with a window": llava_config(
            {"model_type": "mistral", "sliding_window": 6, "num_key_value_heads": 2}, {"num_hidden_layers": 1}
        ),
        "qwen2 decoder with biases": llava_config(
            {"model_type": "qwen2", "num_key_value_heads": 2}, vision_feature_layer=0
        ),
    },
)
CASES = ENCODERS | DUAL_ENCODERS | INTERLEAVED
