"""Greedy output of a request, alone or in any mix: a thousand trials, 200 for each kind of model.

In float64 no token differs. In float32 a batch is summed in another order, so a token may differ where the two best
logits are within 1e-4 of each other; the tokens after it then belong to another sequence.
"""

import random
from functools import partial

import pytest
import torch

from regard.engine.engine import Engine
from regard.engine.request import Request, Sampling
from regard.engine.stores.paged import Paged
from tests.engine.random_requests import CAPACITY, KINDS, random_ids
from tests.laws import build

SAMPLING = Sampling(max_new=12, temperature=0, top_logprobs=2)


def run_in_a_mix(model: torch.nn.Module, prompts: list[tuple[int, ...]], rng: random.Random) -> list[Request]:
    """The prompts join a few at a time, beside sampled requests, in a pool that few of them fill."""
    store = partial(Paged, block=4, blocks=26) if rng.random() < 0.7 else "contiguous"
    engine = Engine(model, rows=6, capacity=CAPACITY, store=store, chunk=rng.choice([4, 16, 64]), queue=999)
    requests, waiting = [], list(prompts)
    while waiting or not engine.idle:
        for _ in range(min(len(waiting), rng.choice([0, 0, 1, 3]))):
            requests.append(engine.submit(waiting.pop(0), SAMPLING))
        if rng.random() < 0.1:
            engine.submit(random_ids(rng, 9), Sampling(max_new=5, seed=rng.randrange(99)))
        engine.step()
    return requests


def first_difference(request: Request, expected: Request) -> int | None:
    pairs = zip(request.new, expected.new, strict=True)
    return next((i for i, (token, other) in enumerate(pairs) if token.id != other.id), None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trials", [8, pytest.param(200, marks=pytest.mark.slow)])
def test_a_greedy_request_in_a_mix_equals_the_request_alone(kind: str, dtype: torch.dtype, trials: int) -> None:
    model, rng = build(KINDS[kind], dtype), random.Random(trials)
    shared = random_ids(rng, 17)
    prompts = [shared[: rng.choice([0, 8, 17])] + random_ids(rng, rng.randint(1, 12)) for _ in range(trials)]
    alone = Engine(model, rows=1, capacity=CAPACITY, store="contiguous", prefix_cache=False)
    for request in run_in_a_mix(model, prompts, rng):
        expected = alone.submit(request.ids, SAMPLING)
        while not alone.idle:
            alone.step()
        if (i := first_difference(request, expected)) is not None:
            (_, best), (_, second) = expected.new[i].top_logprobs
            assert dtype == torch.float32 and best - second < 1e-4
