"""The costs of a spec, computed without allocating its weights.

    FLOPs        2 per multiply-add of a matrix product; training counts as 3 forwards (for each product of the forward,
                 the backward has two)
    cache        per token, Σ over layers of heads · dim for the keys and for the values, where a windowed layer keeps
                 the tokens in its window only; recurrent states once per sequence
    decode step  reads every weight that its tokens use and the whole cache, and generates one token per sequence
    intensity    FLOPs per byte read: about 1 for one sequence in 16 bits, so decoding is memory-bound. It grows with
                 the batch, because all sequences share one read of the weights

`training_flops` counts the products of the modules. The usual estimate 6N, for N active parameters, assumes that each
parameter is multiplied once per token: it includes embeddings that are only looked up, norms and biases, and omits the
products of queries with keys, of scores with values, of `ahead` blocks, and of further uses of shared weights.
"""

from collections import Counter
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from torch import nn

from regard.models.base import Model
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.stack import replace_runs
from regard.parts.state import Declared, FixedSize, PerSource, PerToken, declarations
from regard.planning.flops import ahead_flops, flops_by_part
from regard.planning.groups import groups, table
from regard.planning.memory import format_of
from regard.planning.parameters import Parameters, all_bodies, bodies, count_parameters, stacks
from regard.planning.published import PUBLISHED, find_published
from regard.planning.training import activation_bytes, full_training_bytes
from regard.spec import nearest

if TYPE_CHECKING:
    from regard.language_model import LanguageModel


@dataclass(frozen=True, repr=False)
class Plan:
    """The costs of one spec for a batch of sequences of `context` tokens. `print(plan)` shows them as a table."""

    spec: Model
    context: int
    batch: int
    dtype: str  # of the cache
    weights: str  # format of the weights
    count: Parameters

    @property
    def parameters(self) -> int:
        return self.count.total

    def weight_bytes(self, name: str | None = None) -> int:
        """Bytes of all weights in the named format, by default `self.weights`."""
        return format_of(name or self.weights).bytes(self.parameters)

    @property
    def decoder(self) -> Decoder | None:
        """The stack that generates tokens; None for a model of encoders only."""
        return next((stack for stack in stacks(self.spec).values() if isinstance(stack, Decoder)), None)

    @property
    def attention_shapes(self) -> Counter[tuple[int, int, int]]:
        """The number of layers with each shape (heads, kv_heads, head_dim) of attention."""
        shapes = (body.attention_sizes(width) for body, width in all_bodies(self.spec))
        return Counter(shape for shape in shapes if shape is not None)

    def flops(self, tokens: int, keys: int) -> int:
        """FLOPs of one forward through all stacks, with `tokens` queries and `keys` keys per query."""
        return sum(sum(flops_by_part(stack, tokens, keys).values()) for stack in stacks(self.spec).values())

    @property
    def forward_flops(self) -> int:
        """FLOPs per token of one forward over a whole sequence."""
        return self.flops(self.context, self.context) // self.context

    @property
    def decode_flops(self) -> int:
        """FLOPs of decoding the last token of a sequence whose other tokens are cached."""
        return sum(flops_by_part(self.decoder, 1, self.context).values()) if self.decoder else 0

    @property
    def training_flops(self) -> int:
        """FLOPs per token of forward and backward, including those of the `ahead` blocks."""
        ahead = ahead_flops(self.decoder, self.context, self.context) if self.decoder else 0
        return 3 * (self.flops(self.context, self.context) + ahead) // self.context

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token.

        For an encoder-decoder this includes one token of the source, which is assumed to be as long as the target.
        """
        return sum(size for size, _ in self.cached_per_token())

    def kv_bytes(self, block: int = 1, ring: bool = True, slack: int = 0) -> int:
        """Bytes of the batch's keys and values.

        `block`: tokens per block of a paged store; the length is rounded up to whole blocks. `ring`: a windowed layer
        keeps only its window and `slack` more tokens, by which its ring buffer can rewind.
        """
        tokens = -(-self.context // block) * block
        return self.batch * sum(
            size * (min(tokens, limit + slack) if ring and limit else tokens) for size, limit in self.cached_per_token()
        )

    def cached_per_token(self) -> list[tuple[int, int | None]]:
        """(bytes per token, largest number of cached tokens or None for all), for every mixer that caches tokens."""
        return [
            (format_of(self.dtype).bytes(sum(prod(shape) for shape in state.arrays.values())), max_tokens(state))
            for state in self.declared_states()
            if isinstance(state, PerToken | PerSource)
        ]

    def declared_states(self) -> list[Declared]:
        decoder = self.decoder
        if decoder is None:
            return []
        return [state for body in bodies(decoder) for state in declarations(body.memory(decoder.width))]

    @property
    def state_bytes(self) -> int:
        """Bytes of the batch's recurrent states, kept in at least float32. They do not depend on the context."""
        fixed = (state for state in self.declared_states() if isinstance(state, FixedSize))
        numbers = sum(prod(shape) for state in fixed for shape in state.arrays.values())
        return numbers * max(4, format_of(self.dtype).bits // 8) * self.batch

    @property
    def weights_read(self) -> int:
        """Bytes of the weights that a decoding step reads.

        It reads one row per sequence of an untied embedding, and weights that layers share (`Repeat.tied`) once per
        layer.
        """
        decoder = self.decoder
        if decoder is None:
            return 0
        others = [f"{name} " for name, stack in stacks(self.spec).items() if stack is not decoder]
        untied = replace_runs(self.spec, lambda run: replace(run, tied=False))
        count = self.count if untied == self.spec else count_parameters(untied)
        parts = {part: number for part, number in count.parts.items() if not part.startswith((*others, "ahead"))}
        table = 0 if decoder.tied else max(0, decoder.vocab - self.batch) * decoder.table_dim
        inactive = sum(body.inactive_params(decoder.width, self.batch) for body in bodies(decoder))
        return format_of(self.weights).bytes(sum(parts.values()) - inactive - table)

    @property
    def cache_read(self) -> int:
        """Bytes of the keys, values and states that a decoding step reads."""
        return self.kv_bytes() + self.state_bytes

    @property
    def bytes_read(self) -> int:
        """Bytes that a decoding step reads."""
        return self.weights_read + self.cache_read

    @property
    def intensity(self) -> float:
        return self.batch * self.decode_flops / self.bytes_read

    @property
    def training_bytes(self) -> dict[str, int]:
        return full_training_bytes(self.parameters)

    def activation_bytes(self) -> int:
        """Bytes of the activations that training keeps for the backward pass."""
        return activation_bytes(self.spec, self.batch, self.context)

    @property
    def conditions(self) -> str:
        """The context, batch and formats for which the plan was computed."""
        return f"context {self.context:,}, batch {self.batch}, cache in {self.dtype}, weights in {self.weights}"

    def to_dict(self) -> dict[str, Any]:
        """All costs in groups (groups.py), as data for JSON."""
        return groups(self)

    def __repr__(self) -> str:
        return f"{self.spec.kind}: {self.conditions}\n\n{table(groups(self))}"


def max_tokens(state: PerToken | PerSource) -> int | None:
    windowed = isinstance(state, PerToken) and state.window is not None
    return state.first + state.window if windowed else None


def default_context(spec: Model) -> int | None:
    """The spec's context; for an encoder also the number of tokens of its input, or the reach of its positions."""
    for stack in reversed(stacks(spec).values()):
        length = stack.context or (stack.input.length or stack.position.reach if isinstance(stack, Encoder) else None)
        if length is not None:
            return length
    return None


def plan(
    model: "Model | nn.Module | LanguageModel | str",
    context: int | None = None,
    batch: int = 1,
    dtype: str = "float32",
    weights: str | None = None,
) -> Plan:
    """Count the parameters, FLOPs and bytes of a model without building it.

    model: a spec, a built or loaded model, the name of a published model (llama-3.1-8b), or a size (7B).
    context: tokens per sequence, by default the model's own. batch: sequences per batch. dtype: format of the cache.
    weights: format of the weights, by default that of the cache; int8, int4/128 … are formats as well.
    """
    spec = as_spec(model)
    context = default_context(spec) if context is None else context
    if context is None:
        raise ValueError("this spec has no context; pass the length to plan for, for example context=2048")
    for name, count in (("context", context), ("batch", batch)):
        if count < 1:
            raise ValueError(f"{name}={count} must be at least 1")
    weights = dtype if weights is None else weights
    for name in (dtype, weights):
        format_of(name)
    return Plan(spec, context, batch, dtype, weights, count_parameters(spec))


def as_spec(model: "Model | nn.Module | LanguageModel | str") -> Model:
    """The spec of a module, of a language model or of a published model."""
    if isinstance(model, str):
        published = find_published(model)
        if published is None:
            raise ValueError(
                f"{model!r} is not a published model; {nearest(model, PUBLISHED)} "
                "For a stored model, use regard.plan(regard.load(path))."
            )
        return published
    module = getattr(model, "model", model)  # of a language model
    spec = module if isinstance(module, Model) else getattr(module, "spec", None)
    if not isinstance(spec, Model):
        raise ValueError(f"{type(model).__name__} has no spec; give a spec, or a model that was built from one")
    return spec
