"""Speculative decoding is lossless: the tokens of plain decoding, or their distribution where drafts are random."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from regard.engine.engine import Engine
from regard.engine.request import Draft, Request, Sampling
from regard.engine.sampling import verify_drawn
from regard.engine.speculation.draft_length import COSTS, RETRY, DraftCosts, DraftLength
from regard.engine.speculation.draft_model import DraftModel
from regard.engine.speculation.prompt_lookup import PromptLookup
from regard.engine.speculation.speculation import MAX_DRAFT
from regard.engine.speculation.statistics import SpeculationStatistics
from regard.engine.stores import STORES
from regard.models.decoder import Decoder, DecoderModule
from regard.models.stack import Repeat
from tests.engine.conftest import ATTENTION
from tests.engine.drafters import METHODS, RANDOM
from tests.engine.random_requests import CAPACITY, KINDS, StepClock, build_variants, grammars, random_traffic
from tests.engine.test_random_requests import check
from tests.laws import VOCAB, build

GREEDY = Sampling(max_new=24, temperature=0)


class Scripted:
    """Drafts that are right up to a random position: the known continuation of a sequence with some wrong tokens."""

    def __init__(self, sequences: Sequence[Sequence[int]], seed: int = 0, vocab: int = VOCAB, right: float = 0.7):
        self.sequences, self.rng, self.vocab, self.right = sequences, random.Random(seed), vocab, right

    def open(self, target: DecoderModule, rows: int, capacity: int) -> None:
        pass

    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[Draft]:
        return [Draft(self.draft(request, length)) for request, length in zip(requests, lengths, strict=True)]

    def draft(self, request: Request, length: int) -> list[int]:
        size = len(request.tokens)
        known = next((s[size:] for s in self.sequences if list(s[:size]) == request.tokens), [])
        ids = list(known[: self.rng.randint(0, length)])
        return [id if self.rng.random() < self.right else self.rng.randrange(self.vocab) for id in ids]

    def observe(self, request: Request, inputs: Sequence[int], accepted: int, logits: Tensor) -> None:
        assert len(inputs) == len(logits) and accepted < len(inputs)


def run(engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Request]:
    requests = [engine.submit(ids, sampling) for ids in prompts]
    while not engine.idle:
        engine.step()
    return requests


def ids_of(requests: Sequence[Request]) -> list[list[int]]:
    return [[token.id for token in request.new] for request in requests]


@pytest.fixture(autouse=True)
def free_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are always as long as possible, however many are rejected."""
    monkeypatch.setattr("regard.engine.speculation.speculation.COSTS", {"cpu": DraftCosts(1.0, 0.0)})


@pytest.fixture(scope="module")
def models():
    return {kind: build_variants(kind) for kind in KINDS}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StepClock:
    clock = StepClock()
    for module in ("inputs", "scheduler"):
        monkeypatch.setattr(f"regard.engine.{module}.monotonic", clock)
    return clock


@pytest.mark.ledger("spec.draft")
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_with_wrong_tokens_change_nothing(kind: str, store: str) -> None:
    """A batch of requests whose drafts differ in length and acceptance; greedy and sampled."""
    model, rng = build(KINDS[kind]), random.Random(3)
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in (1, 3, 9, 17)]
    for sampling in (GREEDY, Sampling(max_new=20, temperature=1.5, top_p=0.9, seed=5, top_logprobs=2)):
        plain = run(Engine(model, rows=4, capacity=CAPACITY, store=store), prompts, sampling)
        drafter = Scripted([request.tokens for request in plain])
        engine = Engine(model, rows=4, capacity=CAPACITY, store=store, speculation=drafter, draft_tokens=6)
        found = run(engine, prompts, sampling)
        assert ids_of(found) == ids_of(plain)
        for one, other in zip(found, plain, strict=True):
            for token, expected in zip(one.new, other.new, strict=True):
                assert math.isclose(token.logprob, expected.logprob, abs_tol=1e-9)
                assert token.finish == expected.finish
        metrics = engine.metrics()
        assert 0 < metrics["accepted_draft_tokens"] < metrics["draft_tokens"]
        assert metrics["steps"] < 24


@pytest.mark.ledger("spec.draft", "spec.lookahead")
@pytest.mark.parametrize("seed", range(max(len(KINDS), len(METHODS))))
def test_random_requests_with_drafts_equal_each_alone(models, clock, seed: int) -> None:
    check_traffic(seed, 8, models, clock)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 100 + len(KINDS) * len(METHODS)))
def test_a_thousand_random_requests_with_drafts_equal_each_alone(models, clock, seed: int) -> None:
    """Every method with every kind of model."""
    check_traffic(seed, 30, models, clock)


def check_traffic(seed: int, requests: int, models, clock: StepClock) -> None:
    """All settings of requests, adapters, preemption, shared prefixes, cancellations and failures."""
    traffic = random_traffic(seed, requests, grammars())
    method = list(METHODS)[seed % len(METHODS)]  # their number and that of the kinds have no common divisor
    jobs = traffic.jobs
    if method in RANDOM:  # sampled, their tokens have the same distribution but are others
        jobs = tuple(replace(job, sampling=replace(job.sampling, temperature=0)) for job in jobs)
    drafter = METHODS[method](models[traffic.kind][None])
    options = traffic.engine | {"speculation": drafter, "draft_tokens": 1 + seed % 7}
    check(replace(traffic, engine=options, lag=0, jobs=jobs), models, clock)


@pytest.mark.ledger("spec.onepass")
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("kind", KINDS)
def test_one_forward_has_the_logits_of_single_steps(kind: str, store: str) -> None:
    model, ids, draft = build(KINDS[kind]), [5, 3, 8, 1, 1, 6, 2, 9, 4], [7, 0, 3, 3]

    def prepared() -> tuple[Engine, Request]:
        engine = Engine(model, rows=1, capacity=CAPACITY, store=store)
        request = engine.submit(ids, Sampling(max_new=9, forced_bos_id=2))
        engine.step()
        return engine, request

    engine, request = prepared()
    assert engine.store.reserve(0, request.length + len(draft))
    request.draft = Draft(list(draft))
    with torch.inference_mode():
        together = engine.runner.forward([(request, 1 + len(draft))])
    engine, request = prepared()
    assert engine.store.reserve(0, request.length + len(draft))
    single = []
    for id in [*draft, 0]:
        with torch.inference_mode():
            single.append(engine.runner.forward([(request, 1)]))
        request.cached += 1
        request.tokens.append(id)
    torch.testing.assert_close(together, torch.cat(single), rtol=0, atol=1e-11)


@pytest.fixture(scope="module")
def pair() -> tuple[DecoderModule, DecoderModule]:
    """A target of seven ids, and a draft model that agrees with it in part."""
    spec = Decoder(vocab=7, width=32, layers=(Repeat((ATTENTION,), 2),), context=64)
    target, draft = spec.build(seed=1).double(), spec.build(seed=1).double()
    with torch.no_grad():
        for one, other in zip(target.parameters(), draft.parameters(), strict=True):
            one *= 2 if one.dim() > 1 else 1
            noise = torch.randn(one.shape, dtype=one.dtype, generator=torch.Generator().manual_seed(one.numel()))
            other.copy_(one + 0.4 * one.std() * noise)
    return target, draft


SAMPLINGS = {
    "plain": Sampling(max_new=3, temperature=1.0, forced_bos_id=3),
    "filtered": Sampling(max_new=3, temperature=1.4, top_k=6, top_p=0.95, min_p=0.02, forced_bos_id=3),
    "penalized": Sampling(max_new=3, temperature=0.9, frequency_penalty=0.8, forced_bos_id=3),
}


@pytest.mark.ledger("spec.lossless")
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        pytest.param(method, settings, marks=[] if method == "draft" or settings == "filtered" else pytest.mark.slow)
        for method in (*METHODS, "itself")
        for settings in SAMPLINGS
    ],
)
def test_two_tokens_have_the_joint_distribution_of_plain_decoding(pair, method: str, settings: str) -> None:
    """Chi-square over the 49 pairs of tokens after a fixed first one, against the exact probabilities."""
    target, draft = pair
    drafter = METHODS["draft" if method == "itself" else method](target if method == "itself" else draft)
    count, prompt, sampling = 700, [1, 3, 2, 3, 5, 1], SAMPLINGS[settings]
    engine = Engine(target, rows=64, capacity=16, speculation=drafter, draft_tokens=2, queue=2000)
    requests = [engine.submit(prompt, replace(sampling, seed=seed)) for seed in range(count)]
    while not engine.idle:
        engine.step()
    counts = Counter(tuple(token.id for token in request.new[1:]) for request in requests)
    expected = {(a, b): p for a in range(7) for b in range(7) if (p := joint(target, prompt, (a, b), sampling)) > 0}
    assert set(counts) <= set(expected) and math.isclose(sum(expected.values()), 1, abs_tol=1e-9)
    check_chi_square(counts, {cell: p * count for cell, p in expected.items()})
    accepted = engine.metrics()["draft_acceptance_1"]
    if method == "itself":
        assert accepted == 1 or settings == "penalized"  # p = q, unless the penalty changes p
    elif method == "draft":
        assert 0.2 < accepted < 0.99


def joint(model: DecoderModule, prompt: list[int], pair: tuple[int, int], sampling: Sampling) -> float:
    """The probability of two tokens after the prompt and the forced first token, by plain forwards."""
    probability, new = 1.0, [sampling.forced_bos_id or 0]
    for id in pair:
        with torch.no_grad():
            logits = model(torch.tensor([prompt + new]))[0, -1]
        for seen, times in Counter(new).items():
            logits[seen] -= sampling.frequency_penalty * times
        probability *= reference_probabilities(logits, sampling)[id]
        new.append(id)
    return probability


def reference_probabilities(logits: Tensor, sampling: Sampling) -> list[float]:
    """Temperature, top-k, top-p and min-p by a plain loop, from the most likely token on."""
    p = (logits / sampling.temperature).softmax(-1).tolist()
    order = sorted(range(len(p)), key=lambda id: -p[id])[: sampling.top_k or len(p)]
    total, kept, mass = sum(p[id] for id in order), [], 0.0
    for id in order:
        if mass < sampling.top_p and p[id] >= sampling.min_p * p[order[0]]:
            kept.append(id)
        mass += p[id] / total
    return [p[id] / sum(p[i] for i in kept) if id in kept else 0.0 for id in range(len(p))]


def check_chi_square(counts: Counter, expected: dict) -> None:
    """Cells with an expected count below five are merged. Fails by chance once in about 10⁵ trials."""
    large = [cell for cell, number in expected.items() if number >= 5]
    rest = sum(expected.values()) - sum(expected[cell] for cell in large)
    statistic = sum((counts[cell] - expected[cell]) ** 2 / expected[cell] for cell in large)
    if rest > 1e-6:
        statistic += (sum(counts.values()) - sum(counts[cell] for cell in large) - rest) ** 2 / rest
    freedom = max(len(large) - (rest <= 1e-6), 1)
    assert statistic < freedom + 4 * math.sqrt(2 * freedom) + 8, (statistic, freedom)


@pytest.mark.ledger("spec.lossless")
def test_a_verified_token_is_distributed_as_p() -> None:
    """Drawn from q, accepted with min(1, p/q): the result is p, and Σ min(p, q) of the tokens are accepted."""
    generator, draws = torch.Generator().manual_seed(0), 4000
    p, q = (torch.randn(2, 6, generator=generator).double() * 1.2).softmax(-1)
    p[0] = 0
    p /= p.sum()
    drafted = torch.multinomial(q, draws, replacement=True, generator=generator).tolist()
    requests = (Request((0,), Sampling(seed=seed)) for seed in range(draws))
    ids = [verify_drawn(p, q, id, request) for id, request in zip(drafted, requests, strict=True)]
    counts = Counter(ids)
    assert counts[0] == 0
    check_chi_square(counts, {id: float(p[id]) * draws for id in range(1, 6)})
    accepted = sum(a == b for a, b in zip(ids, drafted, strict=True)) / draws
    assert abs(accepted - float(torch.minimum(p, q).sum())) < 0.03


def test_statistics_count_positions_and_speed() -> None:
    statistics = SpeculationStatistics(3)
    for length, accepted in ((3, 3), (3, 1), (2, 0)):
        statistics.count_draft(length, accepted)
    assert statistics.acceptance == [2 / 3, 1 / 3, 1 / 2] and statistics.tokens_per_draft == 1 + 4 / 3
    assert statistics.speedup is None and "speculation_speedup" not in statistics.metrics()
    statistics.count_step(plain=False, tokens=7, draft_seconds=1.0, seconds=3.0)
    statistics.count_step(plain=True, tokens=2, draft_seconds=0.0, seconds=2.0)
    assert statistics.speedup == pytest.approx(9 / 6)  # 9 tokens in 6 seconds; without drafts one per second


def test_the_draft_follows_the_acceptance() -> None:
    """Against all lengths by the formula; a request whose drafts are rejected is retried every few steps."""
    for costs, drafted in ((COSTS["cpu"], 15), (COSTS["cuda"], 15), (DraftCosts(0.5, 0.5), 4)):
        length = DraftLength(drafted, costs)
        for accepted in (drafted, drafted, 2, 0, 0, 0, drafted, 1):
            length.update(drafted, accepted)
            alpha = length.accepted / length.verified
            gains = [
                sum(alpha**i for i in range(k + 1))
                / (costs.start + math.ceil((k + 1) / costs.tile) * costs.per_tile if k else 1)
                for k in range(drafted + 1)
            ]
            assert math.isclose(length.gain(length.next()), max(gains))
    assert DraftLength(15, COSTS["cpu"]).next() > 0
    rejected = DraftLength(15, COSTS["cpu"])
    for _ in range(9):
        rejected.update(15, 0)
    lengths = [rejected.next() for _ in range(10)]
    assert lengths[:RETRY] == [0] * RETRY and lengths[RETRY] > 0


def test_a_stop_token_inside_a_draft_ends_the_request(tiny) -> None:
    model = tiny()
    (plain,) = run(Engine(model, rows=1, capacity=64), [[1, 2]], GREEDY)
    stop = plain.new[6].id
    expected = next(i for i, token in enumerate(plain.new) if token.id == stop)
    for options in ({"stop_ids": (stop,)}, {"stop_sequences": ((plain.new[5].id, stop),)}, {"max_new": 7}):
        engine = Engine(model, rows=1, capacity=64, speculation=Scripted([plain.tokens], right=1.0), draft_tokens=15)
        (found,) = run(engine, [[1, 2]], replace(GREEDY, **options))
        (alone,) = run(Engine(model, rows=1, capacity=64), [[1, 2]], replace(GREEDY, **options))
        assert found.tokens == alone.tokens and found.new[-1].finish == alone.new[-1].finish
        assert engine.store.table.lengths.sum() == 0
    assert expected <= 6


def test_a_drafter_that_fails_costs_no_request(tiny) -> None:
    class Failing(Scripted):
        def draft(self, request: Request, length: int) -> list[int]:
            raise RuntimeError("out of memory")

    prompts = [[1, 2], [3, 4, 5]]
    expected = run(Engine(tiny(), rows=2, capacity=64), prompts, GREEDY)
    with pytest.warns(match="the drafter failed .out of memory.; decoding without drafts in this step"):
        found = run(Engine(tiny(), rows=2, capacity=64, speculation=Failing([])), prompts, GREEDY)
    assert ids_of(found) == ids_of(expected)


@pytest.mark.ledger("spec.lookahead")
@pytest.mark.parametrize("method", ["ngram", "lookahead"])
def test_repetitive_output_needs_fewer_forwards(tiny, method: str) -> None:
    model, sampling = tiny(), Sampling(max_new=60, processors=(repeat_five,), seed=0)
    plain, engine = Engine(model, rows=1), Engine(model, rows=1, speculation=METHODS[method](model), draft_tokens=8)
    assert ids_of(run(engine, [[1, 2, 3, 4, 5]], sampling)) == ids_of(run(plain, [[1, 2, 3, 4, 5]], sampling))
    assert engine.metrics()["steps"] < 0.3 * plain.metrics()["steps"]


def repeat_five(tokens: Tensor, logits: Tensor) -> Tensor:
    """The token five positions earlier becomes the most likely one."""
    logits[tokens[-5]] += 200
    return logits


def test_what_does_not_fit_is_refused(tiny) -> None:
    for tokens in (0, MAX_DRAFT + 1, 2.5, True):
        with pytest.raises(ValueError, match="draft_tokens"):
            Engine(tiny(), rows=1, speculation=PromptLookup(), draft_tokens=tokens)
    other = Decoder(vocab=7, width=32, layers=(Repeat((ATTENTION,)),), context=64).build(seed=1).double()
    with pytest.raises(ValueError, match="the draft model has 7 ids, the model 61"):
        Engine(tiny(), rows=1, speculation=DraftModel(other))
    with pytest.raises(ValueError, match="sizes of n-grams"):
        PromptLookup(3, 2)
