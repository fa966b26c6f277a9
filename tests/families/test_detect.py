"""detect_family finds a family that can express a model, or names the field that the nearest one cannot express."""

import pytest

from regard.families import FamilyError, detect_family, family, family_config
from tests.checkpoint.mutations import configs
from tests.laws import MODELS

CONFIGS = dict(configs())
EQUIVALENT = {"phi3": "llama", "mt5": "t5", "distilbert": "bert"}  # both families can express the tiny config


@pytest.mark.parametrize("model_type", CONFIGS)
def test_every_family_is_detected_from_its_own_models(model_type: str) -> None:
    found = detect_family(family(model_type).spec(CONFIGS[model_type]))
    assert found in (model_type, EQUIVALENT.get(model_type))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("learned sinks", "The nearest family is llama: .* cannot express .*sinks=True, only False"),
        ("qk-norm over all", "The nearest family is qwen3: .* cannot express .*norm_over='all', only 'head'"),
        ("sinks and window", "The nearest family is llama: .*mask=SinksAndWindow"),
    ],
)
def test_the_error_names_the_field_that_the_nearest_family_cannot_express(name: str, message: str) -> None:
    with pytest.raises(FamilyError, match=message):
        detect_family(MODELS[name])


def test_a_decoder_family_refuses_an_encoder() -> None:
    with pytest.raises(FamilyError, match="a llama model is a decoder, and this is an encoder"):
        family_config("llama", family("bert").spec(CONFIGS["bert"]))
