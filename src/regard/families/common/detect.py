"""Which family can express a model: each one tries to write its config; the error names what the nearest one lacks."""

import typing

from regard.families import FAMILIES, family
from regard.families.common.config_reader import FamilyError
from regard.models.base import Model

PREFERRED = ("llama", "mistral", "gpt2", "bert", "t5")  # the best known, where several families can express a model


def family_config(model_type: str, model: Model) -> dict[str, typing.Any]:
    """The family's config of this model; raises FamilyError if the family cannot express it."""
    write = family(model_type).config
    model_class = typing.get_type_hints(write)["model"]
    if not isinstance(model, model_class):
        expected, found = with_article(model_class.__name__), with_article(model.kind)
        raise FamilyError(f"a {model_type} model is {expected}, and this is {found}; choose another family")
    return write(model)


def detect_family(model: Model) -> str:
    """The `model_type` of a family that can express this model."""
    refusals: list[tuple[float, str, FamilyError]] = []
    for model_type in dict.fromkeys((*PREFERRED, *FAMILIES)):
        try:
            family_config(model_type, model)
        except FamilyError as error:
            refusals.append((error.differences, model_type, error))
        else:
            return model_type
    _, nearest, error = min(refusals, key=lambda refusal: refusal[0])
    raise FamilyError(f"no family can express this model. The nearest is {nearest}: {error}") from error


def with_article(word: str) -> str:
    return f"{'an' if word[0] in 'aeiouAEIOU' else 'a'} {word.lower()}"
