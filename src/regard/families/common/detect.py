"""Which family can say a model: every one is asked to write its config, and what keeps the nearest from it is named."""

import typing

from regard.families import FAMILIES, family
from regard.families.common.config_reader import FamilyError
from regard.models.base import Model

FIRST = ("llama", "mistral", "gpt2", "bert", "t5")  # where several can: what most readers know


def family_config(model_type: str, model: Model) -> dict[str, typing.Any]:
    """The family's config of this model, or a FamilyError."""
    write = family(model_type).config
    kind = typing.get_type_hints(write)["model"]
    if not isinstance(model, kind):
        raise FamilyError(f"a {model_type} model is {article(kind.__name__)}, and this is {article(model.kind)}")
    return write(model)


def detect_family(model: Model) -> str:
    """The `model_type` of a family that can say this model."""
    refusals: list[tuple[float, str, FamilyError]] = []
    for model_type in dict.fromkeys((*FIRST, *FAMILIES)):
        try:
            family_config(model_type, model)
        except FamilyError as error:
            refusals.append((error.differences, model_type, error))
        else:
            return model_type
    _, nearest, error = min(refusals, key=lambda refusal: refusal[0])
    raise FamilyError(f"no family can say this model. The nearest is {nearest}: {error}") from error


def article(word: str) -> str:
    return f"{'an' if word[0] in 'aeiouAEIOU' else 'a'} {word.lower()}"
