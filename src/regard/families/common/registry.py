"""The families by the `model_type` of their configs. A new one is a file and a line here."""

import difflib
from importlib import import_module
from types import ModuleType

from regard.families.common.config_reader import FamilyError

FAMILIES = {
    "bamba": "regard.families.bamba",
    "bart": "regard.families.bart",
    "bert": "regard.families.bert",
    "big_bird": "regard.families.big_bird",
    "bloom": "regard.families.bloom",
    "clip": "regard.families.clip",
    "cohere2": "regard.families.cohere2",
    "deepseek_v2": "regard.families.deepseek_v2",
    "deepseek_v3": "regard.families.deepseek_v3",
    "deit": "regard.families.deit",
    "dinov2": "regard.families.dinov2",
    "distilbert": "regard.families.distilbert",
    "electra": "regard.families.electra",
    "falcon": "regard.families.falcon",
    "falcon_mamba": "regard.families.falcon_mamba",
    "gemma2": "regard.families.gemma2",
    "gemma3_text": "regard.families.gemma3_text",
    "gpt2": "regard.families.gpt2",
    "gpt_bigcode": "regard.families.gpt_bigcode",
    "gpt_neox": "regard.families.gpt_neox",
    "gpt_oss": "regard.families.gpt_oss",
    "gptj": "regard.families.gptj",
    "granite": "regard.families.granite",
    "jamba": "regard.families.jamba",
    "led": "regard.families.led",
    "llama": "regard.families.llama",
    "llava": "regard.families.llava",
    "longformer": "regard.families.longformer",
    "mamba": "regard.families.mamba",
    "mamba2": "regard.families.mamba2",
    "marian": "regard.families.marian",
    "mistral": "regard.families.mistral",
    "mixtral": "regard.families.mixtral",
    "modernbert": "regard.families.modernbert",
    "mpt": "regard.families.mpt",
    "mt5": "regard.families.mt5",
    "olmo2": "regard.families.olmo2",
    "olmoe": "regard.families.olmoe",
    "opt": "regard.families.opt",
    "pegasus": "regard.families.pegasus",
    "phi": "regard.families.phi",
    "phi3": "regard.families.phi3",
    "qwen2": "regard.families.qwen2",
    "qwen2_moe": "regard.families.qwen2_moe",
    "qwen3": "regard.families.qwen3",
    "qwen3_moe": "regard.families.qwen3_moe",
    "recurrent_gemma": "regard.families.recurrent_gemma",
    "roberta": "regard.families.roberta",
    "roformer": "regard.families.roformer",
    "rwkv": "regard.families.rwkv",
    "siglip": "regard.families.siglip",
    "smollm3": "regard.families.smollm3",
    "switch_transformers": "regard.families.switch_transformers",
    "t5": "regard.families.t5",
    "vit": "regard.families.vit",
    "whisper": "regard.families.whisper",
    "zamba2": "regard.families.zamba2",
}


def family(model_type: object) -> ModuleType:
    """The module of the family whose config.json has this `model_type`."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        # The cutoff is above the similarity of "albert" and "bert", which are different models.
        close = difflib.get_close_matches(str(model_type), FAMILIES, n=1, cutoff=0.82)
        remedy = f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(FAMILIES)}"
        raise FamilyError(f"there is no family {model_type!r}; {remedy}")
    return import_module(FAMILIES[model_type])
