"""Tiny configs of `transformers`, one file per group: name -> (class, settings of its config)."""

from typing import Any

import pytest

VOCAB = 97
LARGE_INIT = {"initializer_range": 0.2}  # attention is then far from uniform and greedy choices are far from ties
NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

TESTED_WITH_OLDEST_TORCH = {  # one class per kind of model
    "LlamaForCausalLM",
    "GptOssForCausalLM",
    "JambaForCausalLM",
    "RwkvForCausalLM",
    "BertForMaskedLM",
    "T5ForConditionalGeneration",
    "ViTForImageClassification",
    "LlavaForConditionalGeneration",
}

Cases = dict[str, tuple[str, dict[str, Any]]]


def params(cases: Cases) -> list[Any]:
    """All cases as pytest parameters; every case but the first of its class is marked slow."""
    first = first_of_each_class(cases)

    def marks(name: str, model: str) -> list[pytest.MarkDecorator]:
        if name not in first:
            return [pytest.mark.slow]
        return [pytest.mark.oldest] if model in TESTED_WITH_OLDEST_TORCH else []

    return [pytest.param(case, id=name, marks=marks(name, case[0])) for name, case in cases.items()]


def one_per_class(cases: Cases) -> list[Any]:
    return [pytest.param(case, id=name) for name, case in first_of_each_class(cases).items()]


def first_of_each_class(cases: Cases) -> Cases:
    first = {model: name for name, (model, _) in reversed(cases.items())}
    return {name: case for name, case in cases.items() if first[case[0]] == name}
