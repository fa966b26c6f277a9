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
products of queries with keys, of scores with values, of multi-token prediction (`ahead` blocks), and of further uses of
shared weights.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod

from regard.formats.base import NumberFormat
from regard.models.base import Model
from regard.models.decoder import Decoder
from regard.models.stack import replace_runs
from regard.parts.body import Body
from regard.parts.state import Declared, FixedSize, PerSource, PerToken, declarations
from regard.planning.flops import ahead_flops, flops_by_part
from regard.planning.memory import STORED, format_of
from regard.planning.parameters import Parameters, all_bodies, bodies, count_parameters, stacks
from regard.planning.training import activation_bytes, full_training_bytes


@dataclass(frozen=True)
class Costs:
    """The costs of one spec for a batch of sequences of `context` tokens."""

    spec: Model
    context: int
    batch: int
    dtype: str  # of the cache
    weights: str  # format of the weights
    count: Parameters
    formats: Mapping[str, NumberFormat] = field(default_factory=dict)  # of the quantized layers, if weights is STORED

    @property
    def parameters(self) -> int:
        return self.count.total

    def weight_bytes(self, name: str | None = None) -> int:
        """Bytes of all weights in the named format, by default `self.weights`."""
        if (name or self.weights) == STORED:
            return sum(self.count.stored_bytes(format_of(self.dtype).bits).values())
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
        """FLOPs per token of forward and backward, including those of multi-token prediction (`ahead` blocks)."""
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
            (bytes_per_token(state, self.dtype), max_tokens(state))
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
        return self.batch * sum(fixed_bytes(state, self.dtype) for state in fixed)

    @property
    def weights_read(self) -> int:
        """Bytes of the weights that a decoding step reads.

        Of an untied embedding it reads one row per sequence; weights that layers share (`Repeat.tied`) it reads once
        per layer.
        """
        decoder = self.decoder
        if decoder is None:
            return 0
        others = [f"{name} " for name, stack in stacks(self.spec).items() if stack is not decoder]
        untied = replace_runs(self.spec, lambda run: replace(run, tied=False))
        count = self.count if untied == self.spec else count_parameters(untied, self.formats)
        unread = (*others, "ahead", "value_head")
        parts = {part: number for part, number in count.parts.items() if not part.startswith(unread)}
        unread_embedding = 0 if decoder.tied else max(0, decoder.vocab - self.batch) * decoder.table_dim
        if self.weights == STORED:
            bits = format_of(self.dtype).bits
            sizes = {part: size for part, size in count.stored_bytes(bits).items() if part in parts}
            name = next(name for name, stack in stacks(self.spec).items() if stack is decoder)
            unused = sum(
                body.inactive_params(decoder.width, self.batch) * sizes[part] / parts[part]
                for body in bodies(decoder)
                if (part := f"{name} {body.kind}".strip()) in parts
            )
            return sum(sizes.values()) - round(unused) - unread_embedding * bits // 8
        inactive = sum(body.inactive_params(decoder.width, self.batch) for body in bodies(decoder))
        return format_of(self.weights).bytes(sum(parts.values()) - inactive - unread_embedding)

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
        weights = f"as stored, others in {self.dtype}" if self.weights == STORED else f"in {self.weights}"
        return f"context {self.context:,}, batch {self.batch}, cache in {self.dtype}, weights {weights}"


def max_tokens(state: PerToken | PerSource) -> int | None:
    windowed = isinstance(state, PerToken) and state.window is not None
    return state.first + state.window if windowed else None


def bytes_per_token(state: PerToken | PerSource, dtype: str) -> int:
    return format_of(dtype).bytes(sum(prod(shape) for shape in state.arrays.values()))


def fixed_bytes(state: FixedSize, dtype: str) -> int:
    return sum(prod(shape) for shape in state.arrays.values()) * max(4, format_of(dtype).bits // 8)


def body_cache_bytes(body: Body, width: int, tokens: int, dtype: str) -> int:
    """Bytes that one layer keeps for one sequence of this many tokens, and of a source that is as long."""
    total = 0
    for state in declarations(body.memory(width)):
        if isinstance(state, PerToken | PerSource):
            limit = max_tokens(state)
            total += bytes_per_token(state, dtype) * (tokens if limit is None else min(tokens, limit))
        elif isinstance(state, FixedSize):
            total += fixed_bytes(state, dtype)
    return total
