"""Patterns of names in the settings of compressed-tensors: matched as `re` does, or refused before they take long."""

import re

import pytest

from regard.checkpoint.foreign_quantized.compressed_tensors_config import matches
from regard.families import FamilyError
from regard.families.common.config_reader import Config

CONFIG = Config("quantization_config", {})
NAMES = [f"model.layers.{i}.{part}" for i in (0, 11) for part in ("self_attn.q_proj", "mlp.experts.3.down_proj")]


@pytest.mark.parametrize(
    "pattern",
    [
        r".*",
        r".*\.(q|k|v|o|gate|up|down)_proj$",
        r".*self_attn\.[qk]_proj.*",
        r"model\.layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj",
        r"(model\.)?layers\.(?:[0-9]|1[01])\.(self_attn|mlp)\..*",
        r"(model\.)?(text\.)?layers\.((0|1)|(10|11))\..*",
        r"(?!.*experts).*_proj",
        r"model\.layers\.1{2}\..*",
        r"[^(|)]*\.[]q*+]_proj",
        r"layers",
        r".*.*.*.*#",
    ],
)
def test_usual_patterns_match_as_re_does(pattern: str) -> None:
    assert [matches(CONFIG, pattern, name) for name in NAMES] == [re.match(pattern, name) is not None for name in NAMES]


@pytest.mark.parametrize(
    "pattern",
    [
        r"(a+)+$",
        r"(?:.|[a-z0-9._]){26}#",
        r".?" * 26 + "#",
        r"(?:[^#]|m|o|.){24}#",
        r"(.|.)" * 30 + "#",
        r"(.|)" * 30 + "#",
        r"(.)?" * 30 + "#",
        r"([)m.]|.)" * 20 + "#",  # parentheses in a class of characters
        r"(\)|.|\w)" * 18 + "#",  # and those that are escaped
        r"(.|(.|(.|.)))" * 14 + "#",
        r".{0,9}" * 20 + "#",
        r"(?#[)" + r"(.|.)" * 30 + "(?#])#",  # a bracket in a comment opens no class
        r"(?x)" + r"(.|.)" * 30 + "#",
        r"a" * 201,
    ],
)
def test_a_pattern_that_could_take_long_is_refused(pattern: str) -> None:
    with pytest.raises(FamilyError, match="is too complex a pattern; list names of layers instead"):
        matches(CONFIG, pattern, "model.layers.0.self_attn.q_proj")


def test_a_long_name_of_a_layer_allows_fewer_repetitions() -> None:
    assert not matches(CONFIG, ".*.*#", "a" * 1000)
    with pytest.raises(FamilyError, match="is too complex a pattern"):
        matches(CONFIG, ".*.*.*#", "a" * 1000)
