"""Decoders that classify or score whole sequences, such as reward models: `LlamaForSequenceClassification`.

    logits = W h_t          h: final hidden states, t: the last token whose id is not `pad_token_id`

The functions take the module of any decoder family. Its config has the keys of the decoder, the labels and the id of
padding; its tensors have the decoder's names, without the head, and `score.weight`. Here the model is an encoder with
causal masks (models/causal_encoder.py). The settings of the decoder's own head are ignored.
"""

from dataclasses import replace
from types import ModuleType
from typing import Any

from regard.families.common.config_reader import Config, FamilyError
from regard.families.common.encoder_heads import head_settings, read_classifier
from regard.families.common.roundtrip import check_roundtrip
from regard.models.causal_encoder import EMBEDDINGS, causal_encoder, headless_decoder, is_causal
from regard.models.encoder import Encoder
from regard.models.heads import Classification
from regard.weights.table import Link, Table

SUFFIX = "ForSequenceClassification"
CLASSES = {  # model_type: the class in transformers; other decoders have none
    "bloom": "BloomForSequenceClassification",
    "deepseek_v2": "DeepseekV2ForSequenceClassification",
    "deepseek_v3": "DeepseekV3ForSequenceClassification",
    "falcon": "FalconForSequenceClassification",
    "gemma2": "Gemma2ForSequenceClassification",
    "gemma3_text": "Gemma3TextForSequenceClassification",
    "gpt2": "GPT2ForSequenceClassification",
    "gpt_bigcode": "GPTBigCodeForSequenceClassification",
    "gpt_neox": "GPTNeoXForSequenceClassification",
    "gpt_oss": "GptOssForSequenceClassification",
    "gptj": "GPTJForSequenceClassification",
    "jamba": "JambaForSequenceClassification",
    "llama": "LlamaForSequenceClassification",
    "mistral": "MistralForSequenceClassification",
    "mixtral": "MixtralForSequenceClassification",
    "mpt": "MptForSequenceClassification",
    "olmo2": "Olmo2ForSequenceClassification",
    "opt": "OPTForSequenceClassification",
    "phi": "PhiForSequenceClassification",
    "phi3": "Phi3ForSequenceClassification",
    "qwen2": "Qwen2ForSequenceClassification",
    "qwen2_moe": "Qwen2MoeForSequenceClassification",
    "qwen3": "Qwen3ForSequenceClassification",
    "qwen3_moe": "Qwen3MoeForSequenceClassification",
    "smollm3": "SmolLM3ForSequenceClassification",
    "zamba2": "Zamba2ForSequenceClassification",
}


def is_classifier_config(config: dict[str, Any]) -> bool:
    return any(name.endswith(SUFFIX) for name in Config("config", config).list_of(str, "architectures", []))


def is_classifier(model: object) -> bool:
    """Whether the model is a decoder with a head for whole sequences."""
    head = model.head if isinstance(model, Encoder) else None
    return isinstance(model, Encoder) and isinstance(head, Classification) and head.pool == "last" and is_causal(model)


def read_sequence_classifier(family: ModuleType, model_type: str, config: dict[str, Any]) -> Encoder:
    hf_config = Config(model_type, config)
    hf_config.architecture([class_of_family(model_type)])
    head = replace(read_classifier(hf_config, "last"), bias=False, pad=hf_config.integer_or_none("pad_token_id"))
    return causal_encoder(family.spec(config), head)


def write_sequence_classifier(family: ModuleType, model_type: str, model: Encoder) -> dict[str, Any]:
    config, settings = decoder_config(family, model), head_settings(model.head)
    pad = model.head.pad if isinstance(model.head, Classification) else None
    config |= {
        "architectures": [class_of_family(model_type)],
        "id2label": settings["id2label"],
        "label2id": settings["label2id"],
        **({} if pad is None else {"pad_token_id": pad}),  # None: an export writes that of the tokenizer
    }
    return check_roundtrip(model_type, model, config, lambda read: read_sequence_classifier(family, model_type, read))


def decoder_config(family: ModuleType, model: Encoder) -> dict[str, Any]:
    """The config of the decoder; in some families its head, which the model does not have, must have a bias."""
    try:
        return family.config(headless_decoder(model))
    except FamilyError as error:
        try:
            return family.config(headless_decoder(model, head_bias=True))
        except FamilyError:
            raise error from None


def sequence_classifier_table(family: ModuleType, model: Encoder) -> Table:
    """The decoder's table with the names of an encoder, and with the classifier's weights instead of the head's."""
    table = family.table(headless_decoder(model))
    links = [
        Link(link.foreign, tuple(EMBEDDINGS.get(name, name) for name in link.ours), *link.ops)
        for link in table.links
        if not link.ours[0].startswith("head.")
    ]
    return Table(
        *links,
        Link("score.weight", "head.labels.weight"),
        prefix=table.prefix,
        ignored=table.ignored,
        derived=table.derived,
        prefix_aliases=table.prefix_aliases,
        leaf_aliases=table.leaf_aliases,
    )


def class_of_family(model_type: str) -> str:
    if model_type not in CLASSES:
        refusal = FamilyError(
            f"transformers has no class for sequence classification with {model_type} models; keep the model in "
            f"regard's own format, or start from a model of one of {', '.join(CLASSES)}"
        )
        refusal.differences = 0  # the family can express the decoder, so that none is nearer
        raise refusal
    return CLASSES[model_type]
