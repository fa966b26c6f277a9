"""What a spec costs, in numbers, without a single weight.

    FLOPs        2 for each multiply-add of a matrix product; training 3 times the forward (the backward is two of them)
    cache        Σ over layers of heads · dim, of keys and of values, for each token (a window's layers: for those in
                 it, in a ring); recurrent states once a text
    a step       reads every weight that a token uses and the whole cache, to write one token a text
    intensity    FLOPs for each byte read: about 1 for one text in 16 bits, so memory sets the pace; texts share weights

A masked product counts in full, as flop counters count it, except that a window's layers see no more than the window.
Of an encoder the blocks are counted, not its input and head.
"""

from collections import Counter
from dataclasses import dataclass
from math import prod

from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.parts.state import Declared, FixedSize, PerSource, PerToken, each
from regard.plan.formats import format_of
from regard.plan.parameters import Parameters, count_parameters
from regard.plan.parts import Half, Planned, all_bodies, bodies, flops, halves
from regard.plan.training import full_bytes


@dataclass(frozen=True)
class Plan:
    """The numbers of one spec for `batch` texts of `context` tokens."""

    spec: Planned
    context: int
    batch: int
    dtype: str  # of what is remembered
    weights: str  # format of the weights
    count: Parameters

    @property
    def parameters(self) -> int:
        return self.count.total

    def weight_bytes(self, name: str | None = None) -> int:
        return format_of(name or self.weights).bytes(self.parameters)

    @property
    def writer(self) -> Decoder | None:
        """The half that writes token by token; None: it only reads."""
        return next((half for half in halves(self.spec).values() if isinstance(half, Decoder)), None)

    @property
    def attentions(self) -> Counter[tuple[int, int, int]]:
        """How many layers have attention of (heads, kv_heads, head_dim)."""
        sizes = (body.attention_sizes(width) for body, width in all_bodies(self.spec))
        return Counter(found for found in sizes if found is not None)

    def flops(self, tokens: int, seen: int) -> int:
        """Of one forward of this many tokens, each before `seen` keys; of two halves, each reads as many."""
        return sum(sum(flops_by_part(half, tokens, seen).values()) for half in halves(self.spec).values())

    @property
    def forward_flops(self) -> int:
        """A token, when a whole text of `context` is read at once."""
        return self.flops(self.context, self.context) // self.context

    @property
    def decode_flops(self) -> int:
        """A token, the last of a text of `context`, when the others are remembered."""
        return sum(flops_by_part(self.writer, 1, self.context).values()) if self.writer else 0

    @property
    def training_flops(self) -> int:
        """A token, forward and backward, with the blocks that guess further ahead."""
        ahead = ahead_flops(self.writer, self.context, self.context) if self.writer else 0
        return 3 * (self.flops(self.context, self.context) + ahead) // self.context

    @property
    def kv_bytes_per_token(self) -> int:
        """Of the text, and of the source where there is one: both are taken to be `context` long."""
        return sum(number for number, _ in self.remembered())

    def kv_bytes(self, block: int = 1, ring: bool = True, slack: int = 0) -> int:
        """Of the whole batch: rounded up to the blocks of a paged store; of a layer with a window what it can see.

        `slack`: as many tokens more, which a store's rings can take back.
        """
        tokens = -(-self.context // block) * block
        kept = [(number, min(tokens, most + slack) if ring and most else tokens) for number, most in self.remembered()]
        return self.batch * sum(number * tokens for number, tokens in kept)

    def remembered(self) -> list[tuple[int, int | None]]:
        """Bytes a token of every mixer of the writer, and how many tokens are ever seen again; None: all."""
        return [
            (format_of(self.dtype).bytes(sum(prod(size) for size in memory.arrays.values())), most_kept(memory))
            for memory in self.memories()
            if isinstance(memory, PerToken | PerSource)
        ]

    def memories(self) -> list[Declared]:
        writer = self.writer
        if writer is None:
            return []
        return [declared for body in bodies(writer) for declared in each(body.memory(writer.width))]

    @property
    def state_bytes(self) -> int:
        """Recurrent states, the same for a text of any length; kept in at least float32."""
        fixed = (memory for memory in self.memories() if isinstance(memory, FixedSize))
        numbers = sum(prod(shape) for memory in fixed for shape in memory.arrays.values())
        return numbers * max(4, format_of(self.dtype).bits // 8) * self.batch

    @property
    def weights_read(self) -> int:
        """Bytes of a decoding step: all that its tokens use, of an untied embedding a row a text."""
        writer = self.writer
        if writer is None:
            return 0
        others = [f"{name} " for name, half in halves(self.spec).items() if half is not writer]
        parts = {part: number for part, number in self.count.parts.items() if not part.startswith((*others, "ahead"))}
        table = 0 if writer.tied else max(0, writer.vocab - self.batch) * writer.table_dim
        inactive = sum(body.inactive_params(writer.width, self.batch) for body in bodies(writer))
        return format_of(self.weights).bytes(sum(parts.values()) - inactive - table)

    @property
    def memory_read(self) -> int:
        return self.kv_bytes() + self.state_bytes

    @property
    def intensity(self) -> float:
        return self.batch * self.decode_flops / (self.weights_read + self.memory_read)

    @property
    def training_bytes(self) -> dict[str, int]:
        return full_bytes(self.parameters)


def most_kept(memory: PerToken | PerSource) -> int | None:
    bounded = isinstance(memory, PerToken) and memory.window is not None
    return memory.first + memory.window if bounded else None


def flops_by_part(half: Half, tokens: int, seen: int) -> dict[str, int]:
    """What grows with the keys that a token sees is told apart from what every token costs."""
    counts = Counter()
    for body in bodies(half):
        alone = flops(body, half.width, tokens, 0)
        counts[body.kind] += alone
        counts[f"{body.kind}, pairs"] += flops(body, half.width, tokens, seen) - alone
    counts["embedding"] = 2 * tokens * between(half)
    if isinstance(half, Decoder):
        counts["head"] = head_flops(half, tokens)
    return {part: number for part, number in counts.items() if number}


def head_flops(half: Decoder, tokens: int) -> int:
    return 2 * tokens * (half.table_dim * half.vocab + between(half))


def between(half: Half) -> int:
    """Weights of the matrix between the table and the stack, where they differ in width."""
    return 0 if half.embedding_dim is None else half.embedding_dim * half.width


def ahead_flops(half: Decoder, tokens: int, seen: int) -> int:
    extra = [flops(s.body, half.width, tokens, seen) for block in half.ahead for s in block.sublayers]
    return sum(extra) + len(half.ahead) * head_flops(half, tokens)


def own_context(spec: Planned) -> int | None:
    """How long its texts are: as it says, as its input makes them, or as far as its positions reach."""
    for half in reversed(halves(spec).values()):
        known = half.input.length or half.position.reach if isinstance(half, Encoder) else half.context
        if known is not None:
            return known
    return None


def plan(
    spec: Planned, context: int | None = None, batch: int = 1, dtype: str = "float32", weights: str | None = None
) -> Plan:
    """The numbers of a spec; `context` is the spec's own unless given, the weights' format that of the cache."""
    context = own_context(spec) if context is None else context
    if context is None:
        raise ValueError("this spec names no context; say for which length to plan, for example context=2048")
    for name, count in (("context", context), ("batch", batch)):
        if count < 1:
            raise ValueError(f"{name}={count} must be at least 1")
    weights = dtype if weights is None else weights
    for name in (dtype, weights):
        format_of(name)
    return Plan(spec, context, batch, dtype, weights, count_parameters(spec))
