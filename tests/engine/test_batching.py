"""The tokens of a request depend only on the request, not on the batch.

Requests with prompts of different lengths join, finish, are cancelled and preempted, for every kind of state, both
stores and several chunk sizes. Each equals the same request in an engine without other requests, and those equal the
model without a cache. The hybrid model, which has every kind of state, runs 200 requests and the other models 80.
"""

import random

import pytest
import torch

from regard.engine.engine import Engine
from regard.engine.request import Request, Sampling, TokenHistory
from regard.engine.sampling import sample
from regard.engine.stores.paged import Paged
from tests.engine.pools import small_store

QUICK = {"attention": 80, "linear": 80, "hybrid": 200, "convolution": 80}  # requests by kind
SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 1.3, "top_k": 7, "top_p": 0.9, "seed": 6},
    {"temperature": 0.7, "min_p": 0.05, "seed": 7, "top_logprobs": 3},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 1.0, "presence_penalty": 1.5, "seed": 8},
]


def make_jobs(count: int = 200) -> list[tuple[list[int], Sampling]]:
    rng = random.Random(3)
    jobs = []
    for i in range(count):
        ids = [rng.randrange(61) for _ in range(rng.choice([1, 2, 3, 7, 8, 15, 16, 17, 30, 40]))]
        jobs.append(
            (ids, Sampling(max_new=rng.randint(1, 14), stop_ids=(rng.randrange(61),), **SETTINGS[i % len(SETTINGS)]))
        )
    return jobs


JOBS = make_jobs()


@pytest.fixture(scope="module")
def single_request_ids(tiny):
    """single_request_ids(kind, count): the ids generated for the first `count` jobs, one by one, in float64."""
    generated = {}

    def ids_of_first(kind: str, count: int) -> list[list[int]]:
        engine = Engine(tiny(kind, torch.float64), rows=1, store="contiguous")
        ids = generated.setdefault(kind, [])
        ids += [[token.id for token in engine.generate(*job)] for job in JOBS[len(ids) : count]]
        return ids[:count]

    return ids_of_first


def run_mixed(engine: Engine, jobs=JOBS, seed: int = 0) -> list[Request]:
    """Submit the jobs a few at a time while others run; every ninth is cancelled at a random step."""
    rng = random.Random(seed)
    requests, to_cancel, waiting = [], [], list(jobs)
    while waiting or not engine.idle:
        for _ in range(rng.choice([0, 0, 1, 1, 2, 5])):
            if waiting:
                requests.append(engine.submit(*waiting.pop(0)))
                if len(requests) % 9 == 0:
                    to_cancel.append(requests[-1])
        produced = engine.step()
        assert all(request.new[-1] is token for request, token in produced)
        if to_cancel and rng.random() < 0.2:
            engine.cancel(to_cancel.pop(rng.randrange(len(to_cancel))))
    return requests


def check_all_rows_and_blocks_are_free(engine: Engine, jobs=JOBS) -> None:
    assert engine.idle and len(engine.scheduler.free_rows) == engine.store.rows
    if isinstance(engine.store, Paged):
        assert engine.store.pool.available == engine.store.blocks and not any(engine.store.owned)
    metrics = engine.metrics()
    assert metrics["running"] == metrics["waiting"] == metrics["error"] == 0
    assert metrics["stop"] + metrics["length"] + metrics["cancelled"] == len(jobs)


@pytest.mark.ledger("kv.cache", "model.autoregressive")
@pytest.mark.parametrize(("kind", "count"), QUICK.items())
def test_a_single_request_equals_the_model_without_a_cache(tiny, single_request_ids, kind, count) -> None:
    model = tiny(kind, torch.float64)
    for (ids, sampling), new in zip(JOBS[:count], single_request_ids(kind, count), strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([ids + new]))[0, len(ids) - 1 : -1]  # (new, V)
        request = Request(tuple(ids), sampling)
        request.history = TokenHistory(ids, 61, logits.device) if sampling.penalizes else None
        for row, id in zip(logits, new, strict=True):
            (token,) = sample(row.unsqueeze(0), [request]).read()
            assert token.id == id
            request.add(token)


@pytest.mark.ledger("eng.continuous", "kv.paged", "inf.prefill")
@pytest.mark.parametrize("store", ["contiguous", "paged"])
@pytest.mark.parametrize(
    ("kind", "chunk", "count"),
    [
        *((kind, 64, count) for kind, count in QUICK.items()),
        *(pytest.param(kind, 7, 70, marks=pytest.mark.slow) for kind in QUICK),
        *(pytest.param(kind, 1, 50, marks=pytest.mark.slow) for kind in QUICK),
    ],
)
def test_batched_equals_alone(tiny, single_request_ids, kind, store, chunk, count) -> None:
    engine = Engine(tiny(kind, torch.float64), rows=6, store=small_store(store, 18), chunk=chunk, queue=500)
    requests = run_mixed(engine, JOBS[:count])
    for request, expected in zip(requests, single_request_ids(kind, count), strict=True):
        ids = [token.id for token in request.new]
        assert ids == (expected[: len(ids)] if request.finish == "cancelled" else expected)
    check_all_rows_and_blocks_are_free(engine, JOBS[:count])
    assert engine.metrics()["cancelled"] >= count // 40
    assert engine.metrics()["preemptions"] >= (count // 10 if store == "paged" else 0)


@pytest.mark.parametrize("store", ["contiguous", "paged"])
@pytest.mark.parametrize("kind", QUICK)
def test_float32_chooses_the_most_likely_token_up_to_near_ties(tiny, kind, store) -> None:
    model, jobs = tiny(kind, torch.float32), JOBS[:80]
    engine = Engine(model, rows=6, store=small_store(store, 18), chunk=16, queue=500)
    for request in run_mixed(engine, [(ids, Sampling(max_new=12, temperature=0)) for ids, _ in jobs]):
        if request.new:
            with torch.inference_mode():
                logits = model(torch.tensor([request.tokens[:-1]]))[0, len(request.ids) - 1 :]  # (new, V)
            chosen = logits.gather(-1, torch.tensor(request.tokens[len(request.ids) :]).unsqueeze(-1)).squeeze(-1)
            assert (logits.amax(-1) - chosen).max() < 1e-4
    check_all_rows_and_blocks_are_free(engine, jobs)
