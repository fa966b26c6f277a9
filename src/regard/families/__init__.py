"""Models of `transformers`: each family converts its config to a spec, a spec to its config, and the weights both ways.

    spec(config) -> Model        config(model) -> dict        table(model) -> Table

A family has no class and no forward of its own. The decoders of all families can also classify whole sequences
(common/sequence_classification.py): `family_spec`, `family_config` and `weight_table` handle both. Reading a config
raises FamilyError with the key of a setting that our parts cannot express. Writing one raises FamilyError with the path
of a field that the class in `transformers` cannot express.
"""

import typing

from regard.families.common.config_reader import FamilyError
from regard.families.common.registry import FAMILIES, family
from regard.families.common.sequence_classification import (
    is_classifier,
    is_classifier_config,
    read_sequence_classifier,
    sequence_classifier_table,
    write_sequence_classifier,
)
from regard.models.base import Model
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.value_head import without_value_head
from regard.weights.table import Table

PREFERRED = ("llama", "mistral", "gpt2", "bert", "t5")  # detect_family tries these first


def family_config(model_type: str, model: Model) -> dict[str, typing.Any]:
    """The family's config of this model, without its value head; raises FamilyError if the family cannot express it."""
    model = without_value_head(model)
    if classifies_with(model, model_type):
        return write_sequence_classifier(family(model_type), model_type, model)
    expected_class = model_class(model_type)
    if not isinstance(model, expected_class):
        expected, found = with_article(expected_class.__name__), with_article(model.kind)
        raise FamilyError(f"a {model_type} model is {expected}, and this is {found}; choose another family")
    return family(model_type).config(model)


def family_spec(config: dict[str, typing.Any]) -> Model:
    """The model of a config.json; raises FamilyError if our parts cannot express it."""
    model_type = config.get("model_type")
    module = family(model_type)
    if is_classifier_config(config) and model_class(str(model_type)) is Decoder:
        return read_sequence_classifier(module, str(model_type), config)
    return module.spec(config)


def can_express(model_type: str, model: Model) -> bool:
    try:
        family_config(model_type, model)
    except FamilyError:
        return False
    return True


def model_class(model_type: str) -> type[Model]:
    """The class of the family's specs: Decoder, Encoder …"""
    return typing.get_type_hints(family(model_type).config)["model"]


def classifies_with(model: Model, model_type: str) -> typing.TypeGuard[Encoder]:
    """Whether the model classifies sequences with a decoder, and the family is one of decoders."""
    return is_classifier(model) and model_class(model_type) is Decoder


def detect_family(model: Model) -> str:
    """The `model_type` of a family that can express this model."""
    refusals: list[tuple[float, str, FamilyError]] = []
    for model_type in dict.fromkeys((*PREFERRED, *FAMILIES)):
        if not isinstance(model, model_class(model_type)) and not classifies_with(model, model_type):
            continue
        try:
            family_config(model_type, model)
        except FamilyError as error:
            refusals.append((error.differences, model_type, error))
        else:
            return model_type
    if not refusals:
        raise FamilyError(f"no family has models of the kind {model.kind}; save the model in regard's own format")
    _, nearest, error = min(refusals, key=lambda refusal: refusal[0])
    raise FamilyError(
        f"no family can express this {model.kind}; keep it in regard's own format. "
        f"The nearest family is {nearest}: {error}"
    ) from error


def weight_table(model: Model, model_type: str | None = None) -> Table:
    """The names of the model's weights in a family; None: in one that can express the model."""
    model, model_type = without_value_head(model), model_type or detect_family(model)
    if classifies_with(model, model_type):
        return sequence_classifier_table(family(model_type), model)
    return family(model_type).table(model)


def with_article(word: str) -> str:
    return f"{'an' if word[0] in 'aeiouAEIOU' else 'a'} {word.lower()}"
