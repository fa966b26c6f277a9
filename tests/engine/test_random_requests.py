"""Requests with random settings in one engine equal each of them alone, and leave nothing behind.

A failure names the seed of its traffic: `traffic_of(seed)` builds it again.
"""

import math
import warnings
from collections.abc import Sequence

import pytest
import torch

from regard.compat import cannot_compile
from regard.engine.engine import Engine
from regard.engine.request import Request, Token
from regard.engine.stores.paged import Paged
from tests.engine.random_requests import (
    KINDS,
    StepClock,
    Traffic,
    build_variants,
    grammars,
    random_traffic,
    run,
    run_alone,
)

TOLERANCE = 1e-9  # of log-probabilities, in float64
SLOW_SEEDS = 20  # of 50 requests each


@pytest.fixture(scope="module")
def models():
    return {kind: build_variants(kind) for kind in KINDS}


@pytest.fixture(scope="module")
def compiled_grammars():
    return grammars()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StepClock:
    clock = StepClock()
    for module in ("inputs", "scheduler"):
        monkeypatch.setattr(f"regard.engine.{module}.monotonic", clock)
    return clock


@pytest.mark.ledger("eng.continuous", "kv.prefix")
@pytest.mark.parametrize("seed", range(len(KINDS)))
def test_random_requests_equal_each_alone(models, compiled_grammars, clock, seed: int) -> None:
    check(random_traffic(seed, 14, compiled_grammars), models, clock)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 100 + SLOW_SEEDS))
def test_a_thousand_random_requests_equal_each_alone(models, compiled_grammars, clock, seed: int) -> None:
    check(random_traffic(seed, 50, compiled_grammars), models, clock)


@pytest.mark.slow
@pytest.mark.skipif(cannot_compile(torch.device("cpu")) is not None, reason="needs a C++ compiler")
@pytest.mark.timeout(900)  # each compiles several steps
@pytest.mark.parametrize("seed", [200, 201])
def test_random_requests_in_a_compiled_engine_equal_each_alone(compiled_grammars, clock, seed: int) -> None:
    torch._dynamo.reset()
    traffic = random_traffic(seed, 50, compiled_grammars, compile=True)
    variants = build_variants(traffic.kind, repeated=False)  # repeated layers would only be compiled again
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns on its first compile
        check(traffic, {traffic.kind: variants}, clock)


def check(traffic: Traffic, models, clock: StepClock) -> None:
    variants = models[traffic.kind]
    engine, submitted = run(traffic, variants, clock)
    for number, (job, request) in enumerate(submitted):
        expected = run_alone(job, variants)
        context = f"seed {traffic.seed}, {traffic.kind}, {traffic.engine}, lag {traffic.lag}, request {number}: {job}"
        assert has_equal_result(request, expected), (
            f"{context}\n{request.finish}: {request.new}\n{expected.finish}: {expected.new}"
        )
    check_nothing_is_left(engine, len(submitted))
    for job, _ in submitted[:5]:  # prefixes that are cached now
        again = engine.submit(job.ids, job.sampling, embeddings=job.inputs(), salt=job.salt, adapter=job.adapter)
        while not engine.idle:
            engine.step()
        assert has_equal_result(again, run_alone(job, variants)), f"seed {traffic.seed}, with cached prefixes: {job}"


def has_equal_result(request: Request, expected: Request) -> bool:
    """Whether tokens, log-probabilities, finish and error agree; a cancelled or late request has the first tokens."""
    if request.finish in ("cancelled", "timeout"):
        return are_equal(request.new, expected.new[: len(request.new)]) and request.error is None
    if (request.finish, request.error) != (expected.finish, expected.error) or not are_equal(request.new, expected.new):
        return False
    # those of a request with NaN depend on its chunks: attention multiplies masked values too
    return request.finish == "error" or are_equal(request.prompt_logprobs, expected.prompt_logprobs)


def are_equal(tokens: Sequence[Token], expected: Sequence[Token]) -> bool:
    """Equal ids, and log-probabilities up to rounding."""

    def numbers(token: Token) -> list[float]:
        return [token.logprob, *(logprob for _, logprob in token.top_logprobs)]

    def ids(token: Token) -> list[int]:
        return [token.id, *(id for id, _ in token.top_logprobs)]

    return list(map(ids, tokens)) == list(map(ids, expected)) and all(
        math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        for one, other in zip(tokens, expected, strict=True)
        for a, b in zip(numbers(one), numbers(other), strict=True)
    )


def check_nothing_is_left(engine: Engine, requests: int) -> None:
    metrics, scheduler = engine.metrics(), engine.scheduler
    assert engine.idle and scheduler.free_rows == set(range(engine.store.rows))
    assert not scheduler.waiting.queues and not scheduler.waiting.served and not scheduler.waiting.requests
    assert sum(metrics[name] for name in ("stop", "length", "cancelled", "timeout", "error")) == requests
    assert not engine.store.table.lengths.any()
    if isinstance(engine.store, Paged):
        assert metrics["free_blocks"] == metrics["blocks"] and not any(engine.store.owned)
    engine.store.check()
