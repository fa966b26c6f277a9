"""Random engines and random traffic for them: every setting of a request, shared prefixes, cancellations, deadlines.

traffic = random_traffic(seed, requests=40, …)     a function of the seed
engine, submitted = run(traffic, model, clock)     all requests in one engine
expected = run_alone(job, model)                   one request in an engine of its own
"""

import random
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from regard.adapt import LoRA, add_lora
from regard.adapt.lora_weights import lora_weights, without_gradients
from regard.engine.beam import Beams
from regard.engine.contrastive import ContrastiveOptions
from regard.engine.engine import Engine
from regard.engine.grammar import Grammar, GrammarCompiler
from regard.engine.request import QueueFull, Request, Sampling
from regard.engine.stores.paged import Paged
from regard.kernels.attention.patterns.window import Window
from regard.models.stack import without_repeats
from regard.parts.attention import Attention
from regard.parts.latent_attention import LatentAttention
from regard.parts.position.rope import Rope
from regard.parts.ssm.mamba import Mamba
from regard.parts.ssm.mamba2 import Mamba2
from tests.laws import VOCAB, WIDTH, block, build, decoder

CAPACITY = 44
GQA = Attention(4, 2, position=Rope())
WINDOW = Attention(4, 2, position=Rope(), mask=Window(6))
KINDS = {
    "decoder": decoder(block(GQA), tied=False),
    "window": decoder(block(WINDOW)),
    "latent": decoder(block(LatentAttention(3, 8, 6, 4, position=Rope()))),
    "mamba": decoder(block(Mamba(4))),
    "hybrid": without_repeats(decoder(block(Mamba2(4, 12)), block(WINDOW), block(GQA))),
}
LATENT_TARGETS = ("q_proj", "latent_proj", "o_proj", "down_proj")  # stacked layers cannot have adapters
ADAPTERS = {"a": 2, "b": 5}  # ranks
Variants = dict[str | None, nn.Module]  # a model without adapters, and with each of them
STOP = 0
LETTERS = [b"", *(bytes([letter]) for letter in b'abcdefghij0123456789{}":,'), b"ab", b"12", b"", b'{"', b'":']


def build_variants(kind: str, repeated: bool = True) -> Variants:
    model = build(KINDS[kind] if repeated else without_repeats(KINDS[kind]))
    variants: Variants = {None: model}
    targets = LATENT_TARGETS if kind == "latent" else "all-linear"
    for name, rank in ADAPTERS.items():
        adapted = without_gradients(model)
        add_lora(adapted, LoRA(rank, 4.0 + rank, targets), seed=rank)
        generator = torch.Generator().manual_seed(rank)
        for parameter in (parameter for path, parameter in adapted.named_parameters() if "lora_B" in path):
            nn.init.normal_(parameter, std=0.4, generator=generator)
        variants[name] = adapted.eval()
    return variants


def add_by_position(tokens: Tensor, logits: Tensor) -> Tensor:
    return logits - torch.arange(len(logits)) * (len(tokens) % 3)


def keep_even(tokens: Tensor, logits: Tensor) -> Tensor:
    return logits.masked_fill_(torch.arange(len(logits)) % 2 == 1, -torch.inf)


def fail_after_ten(tokens: Tensor, logits: Tensor) -> Tensor:
    if len(tokens) > 10:
        raise KeyError("a logits processor of a test")
    return logits


@dataclass(frozen=True)
class Job:
    """A request, or n of them, and what happens to it."""

    ids: tuple[int, ...]
    sampling: Sampling
    embeddings: int | None = None  # the seed of random ones
    n: int = 1
    salt: str = ""
    priority: int = 0
    tenant: str = ""
    adapter: str | None = None
    deadline: float | None = None  # in steps
    cancel_after: int | None = None  # steps

    def inputs(self) -> Tensor | None:
        if self.embeddings is None:
            return None
        generator = torch.Generator().manual_seed(self.embeddings)
        values = torch.randn(len(self.ids), WIDTH, dtype=torch.float64, generator=generator)
        return (
            values.index_fill_(0, torch.tensor([len(self.ids) - 1]), torch.nan) if self.embeddings % 5 == 0 else values
        )


@dataclass(frozen=True)
class Traffic:
    """The settings of an engine, and the jobs in the order of their submission."""

    seed: int
    kind: str
    engine: dict[str, Any]
    lag: int  # 1: tokens are read one step late, as on a GPU
    jobs: tuple[Job, ...]


def grammars() -> list[Grammar]:
    compiler = GrammarCompiler(LETTERS, [STOP], vocab=VOCAB)
    return [
        compiler.regex("a[b-d]{2,5}(12)*"),
        compiler.choice(["abc", "abd", "ja"]),
        compiler.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
    ]


def random_traffic(seed: int, requests: int, compiled_grammars: list[Grammar], compile: bool = False) -> Traffic:
    """Traffic of at least this many requests. The model depends on the seed too: seeds 0 to 4 are all kinds."""
    rng = random.Random(seed)
    prefixes = [random_ids(rng, rng.randint(3, 26)) for _ in range(4)]
    jobs: list[Job] = []
    while sum(job.n for job in jobs) < requests:
        jobs.append(random_job(rng, prefixes, compiled_grammars))
    block = rng.choice([2, 4, 8])
    blocks = -(-CAPACITY // block) + rng.randint(0, 12)  # a pool that few requests fill
    paged = partial(Paged, block=block, blocks=blocks, states=rng.choice([None, 0, 3]))
    options = {
        "rows": rng.choice([1, 2, 3, 5, 8]), "capacity": CAPACITY, "store": rng.choice(["contiguous", paged, paged]),
        "queue": rng.choice([2, 8, 99]), "chunk": rng.choice([1, 2, 5, 8, 16, 64]),
        "prefix_cache": rng.random() < 0.8, "max_loras": rng.choice([1, 2]), "compile": compile,
    }  # fmt: skip
    return Traffic(seed, list(KINDS)[seed % len(KINDS)], options, rng.choice([0, 1]), tuple(jobs))


def random_ids(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCAB) for _ in range(length))


def random_job(rng: random.Random, prefixes: list[tuple[int, ...]], compiled_grammars: list[Grammar]) -> Job:
    prefix = rng.choice([(), *prefixes])
    prefix = prefix[: rng.choice([len(prefix), rng.randint(0, len(prefix))])]
    ids = (prefix + random_ids(rng, rng.choice([0, 1, 2, 3, 7])))[: CAPACITY - 1] or (STOP,)
    return Job(
        ids,
        random_sampling(rng, compiled_grammars),
        embeddings=rng.randrange(99) if rng.random() < 0.1 else None,
        n=rng.choice([1, 1, 1, 1, 1, 2, 4]),
        salt=rng.choice(["", "", "", "a", "grüße 😀"]),
        priority=rng.choice([-1, 0, 0, 0, 2]),
        tenant=rng.choice(["", "", "a", "ü"]),
        adapter=rng.choice([None, None, *ADAPTERS]),
        deadline=rng.choice([None] * 9 + [0.001, float(rng.randint(1, 40))]),
        cancel_after=rng.choice([None] * 7 + [0, rng.randint(1, 30)]),
    )


def random_sampling(rng: random.Random, compiled_grammars: list[Grammar]) -> Sampling:
    max_new = rng.randint(1, 16)
    options = {
        "top_k": rng.randint(0, 12),
        "top_p": rng.uniform(0.3, 1),
        "min_p": rng.uniform(0, 0.2),
        "typical_p": rng.uniform(0.2, 1),
        "repetition_penalty": rng.uniform(0.7, 1.6),
        "presence_penalty": rng.uniform(-1, 1),
        "frequency_penalty": rng.uniform(-1, 1),
        "top_logprobs": rng.choice([1, 3, 99]),
        "prompt_logprobs": rng.choice([0, 2]),
        "logit_bias": {rng.randrange(VOCAB): rng.choice([-torch.inf, -3.0, 4.0]) for _ in range(3)},
        "suppress_ids": random_ids(rng, 3),
        "bad_words": tuple(random_ids(rng, rng.randint(1, 3)) for _ in range(12)),
        "stop_sequences": tuple(random_ids(rng, rng.randint(1, 2)) for _ in range(4)),
        "stop_ids": (rng.randrange(VOCAB), VOCAB + 7),
        "processors": rng.choice([(add_by_position,), (add_by_position, keep_even), (fail_after_ten,)]),
        "min_new": rng.randint(0, max_new),
        "forced_bos_id": rng.randrange(VOCAB),
        "forced_eos_id": rng.randrange(VOCAB),
    }
    chosen = {name: options[name] for name in rng.sample(list(options), k=rng.choice([0, 0, 1, 2, 4, 8]))}
    if rng.random() < 0.15:
        for name in ("min_new", "forced_bos_id", "forced_eos_id"):  # refused with a grammar
            chosen.pop(name, None)
        chosen |= {"grammar": rng.choice(compiled_grammars), "stop_ids": (STOP,)}
    temperature = rng.choice([0.0, 0.0, 0.7, 1.0, 2.0])
    return Sampling(max_new=max_new, temperature=temperature, seed=rng.randrange(2**64), **chosen)


def run(traffic: Traffic, variants: Variants, clock: "StepClock") -> tuple[Engine, list[tuple[Job, Request]]]:
    """All jobs in one engine, and each request with its job. clock: counts the steps."""
    engine, rng = Engine(variants[None], **traffic.engine), random.Random(traffic.seed)
    engine.lag = traffic.lag
    for name in ADAPTERS:
        engine.load_adapter(name, lora_weights(variants[name]))
    waiting, submitted, cancellations = list(traffic.jobs), [], []
    while waiting or not engine.idle:
        for _ in range(rng.choice([0, 0, 1, 1, 2, 6])):
            if waiting and (requests := submit(engine, waiting[0])):
                job = waiting.pop(0)
                submitted += [(replace(job, sampling=request.sampling), request) for request in requests]
                if job.cancel_after is not None:
                    cancellations.append((clock.steps + job.cancel_after, requests[-1]))
        for step, request in cancellations:
            if step <= clock.steps:
                engine.cancel(request)
        if rng.random() < 0.03:
            check_searches(engine, variants, rng.choice(traffic.jobs))
        engine.step()
        clock.steps += 1
    return engine, submitted


def check_searches(engine: Engine, variants: Variants, job: Job) -> None:
    """A search between the steps of other requests finds what it finds alone."""
    width, ids = min(2, engine.store.rows), job.ids[:9]
    alone = Engine(variants[job.adapter], rows=width, capacity=CAPACITY, store="contiguous")
    greedy, beams, options = Sampling(max_new=4, temperature=0), Beams(width), ContrastiveOptions(width)
    found = engine.beam_search(ids, beams, greedy, adapter=job.adapter)
    assert [beam.ids for beam in found] == [beam.ids for beam in alone.beam_search(ids, beams, greedy)]
    tokens = engine.contrastive_search(ids, options, greedy, adapter=job.adapter)
    assert [token.id for token in tokens] == [token.id for token in alone.contrastive_search(ids, options, greedy)]


def submit(engine: Engine, job: Job) -> list[Request]:
    """The requests of a job; none if the queue is full."""
    options = {
        "salt": job.salt, "priority": job.priority, "tenant": job.tenant, "deadline": job.deadline,
        "adapter": job.adapter,
    }  # fmt: skip
    try:
        n = min(job.n, engine.max_requests)
        if n > 1:
            return engine.submit_n(job.ids, job.sampling, n, embeddings=job.inputs(), **options)
        return [engine.submit(job.ids, job.sampling, embeddings=job.inputs(), **options)]
    except QueueFull:
        return []


def run_alone(job: Job, variants: Variants) -> Request:
    """The request of a job in an engine of its own, without deadline or cancellation, with the whole prompt at once."""
    model = variants[job.adapter]
    engine = Engine(model, rows=1, capacity=CAPACITY, store="contiguous", chunk=CAPACITY, prefix_cache=False)
    request = engine.submit(job.ids, job.sampling, embeddings=job.inputs())
    while request.finish is None:
        engine.step()
    return request


class StepClock:
    """Stands in for time.monotonic: deadlines are counted in steps."""

    steps = 0

    def __call__(self) -> float:
        return float(self.steps)
