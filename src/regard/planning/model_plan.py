"""`plan(model)`: the costs of a model before it is built, as data and as a table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from regard.formats.base import NumberFormat
from regard.models.base import Model
from regard.models.encoder import Encoder
from regard.planning.cost import Costs
from regard.planning.groups import groups, table
from regard.planning.memory import STORED, format_of
from regard.planning.parameters import count_parameters, stacks
from regard.planning.published import PUBLISHED, find_published
from regard.spec import suggest_name

MOST_TOKENS = 10**12  # per sequence, and sequences per batch


class HasModel(Protocol):
    """A model with its tokenizer, such as a LanguageModel."""

    model: nn.Module


@dataclass(frozen=True, repr=False)
class Plan(Costs):
    """The costs of one spec for a batch of sequences of `context` tokens. `print(plan)` shows them as a table."""

    def to_dict(self) -> dict[str, Any]:
        """All costs in groups (groups.py), as data for JSON."""
        return groups(self)

    def __repr__(self) -> str:
        return f"{self.spec.kind}: {self.conditions}\n\n{table(groups(self))}"


def default_context(spec: Model) -> int | None:
    """The spec's context; for an encoder without one, the length of its input or the number of its positions."""
    for stack in reversed(stacks(spec).values()):
        length = stack.context
        if length is None and isinstance(stack, Encoder):
            length = stack.input.length or stack.position.max_positions
        if length is not None:
            return length
    return None


def plan(
    model: Model | nn.Module | HasModel | str,
    context: int | None = None,
    batch: int = 1,
    dtype: str = "float32",
    weights: str | None = None,
    formats: Mapping[str, NumberFormat] | None = None,
) -> Plan:
    """Count the parameters, FLOPs and bytes of a model without building it.

    model: a spec, a built or loaded model, the name of a published model (llama-3.1-8b), or a size (7B).
    context: tokens per sequence, by default the model's own. batch: sequences per batch. dtype: format of the cache.
    weights: format of the weights, by default that of the cache; int8, int4/128 … are formats as well. formats: without
    `weights`, of the layers of a quantized model, by name.
    """
    spec = as_spec(model)
    context = default_context(spec) if context is None else context
    if context is None:
        raise ValueError("this spec has no context; pass the length to plan for, for example context=2048")
    for name, count in (("context", context), ("batch", batch)):
        if not 1 <= count <= MOST_TOKENS:
            raise ValueError(f"{name}={count} must be from 1 to {MOST_TOKENS:,}")
    formats = formats if weights is None and formats else {}
    for name in (dtype, dtype if weights is None else weights):
        format_of(name)
    if weights is None:
        weights = STORED if formats else dtype
    return Plan(spec, context, batch, dtype, weights, count_parameters(spec, formats), formats)


def as_spec(model: Model | nn.Module | HasModel | str) -> Model:
    """The spec of a module, of a language model or of a published model."""
    if isinstance(model, str):
        published = find_published(model)
        if published is None:
            raise ValueError(
                f"{model!r} is not a published model; {suggest_name(model, PUBLISHED)} "
                "For a stored model, use regard.plan(regard.load(path))."
            )
        return published
    module = getattr(model, "model", model)  # a LanguageModel has its module in .model
    spec = module if isinstance(module, Model) else getattr(module, "spec", None)
    if not isinstance(spec, Model):
        raise ValueError(f"{type(model).__name__} has no spec; give a spec, or a model that was built from one")
    return spec
