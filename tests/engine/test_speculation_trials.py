"""Greedy output with drafts, token for token that of plain decoding: random trials in float64.

A trial is a model of tests/laws.py, a store, a method, and a batch of prompts of different lengths, some of which wait
for a row. The mixers are all of those that a decoder can have.
"""

import random
from functools import cache, partial

import pytest

from regard.engine.engine import Engine
from regard.engine.request import Sampling
from regard.engine.speculation.draft_length import DraftCosts
from regard.engine.stores import STORES
from regard.engine.stores.paged import Paged
from regard.models.decoder import DecoderModule
from regard.models.stack import unroll
from regard.parts.state import exact_cache_limit
from tests.engine.drafters import METHODS
from tests.laws import MODELS, VOCAB, build

NEW, PROMPTS = 14, 8  # tokens per request; prompts per model
ALL_STORES = {**STORES, "few blocks": partial(Paged, block=4, blocks=22)}


@pytest.fixture(autouse=True)
def free_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are always as long as possible, however many are rejected."""
    monkeypatch.setattr("regard.engine.speculation.speculation.COSTS", {"cpu": DraftCosts(1.0, 0.0)})


@cache
def model_of(name: str) -> tuple[DecoderModule, int, tuple[tuple[int, ...], ...]]:
    """A model, the tokens that a request can have, and prompts."""
    rng = random.Random(name)
    phrase = [rng.randrange(VOCAB) for _ in range(3)]
    prompts = [tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))) for _ in range(PROMPTS - 2)]
    prompts += [tuple(phrase * 3), tuple(phrase * 6)]  # which drafts can repeat
    capacity = min(40, exact_cache_limit(MODELS[name].memory()) or 40)  # some rotations depend on the length
    return build(MODELS[name]), capacity, tuple(ids[: capacity // 2] for ids in prompts)


@cache
def output_alone(name: str, ids: tuple[int, ...]) -> list[int]:
    model, capacity, _ = model_of(name)
    engine = Engine(model, rows=1, capacity=capacity, store="contiguous")
    return [token.id for token in engine.generate(ids, greedy())]


def greedy() -> Sampling:
    return Sampling(max_new=NEW, temperature=0)


def run_trial(number: int) -> int:
    """Returns how many tokens of drafts were accepted."""
    rng = random.Random(number)
    name, method = list(MODELS)[number % len(MODELS)], list(METHODS)[rng.randrange(len(METHODS))]
    model, capacity, prompts = model_of(name)
    if method == "first layers" and len(unroll(model.spec.layers)) == 1:
        method = "draft"
    if method == "eagle" and model.spec.table_dim != model.spec.width:  # refused
        method = "medusa"
    engine = Engine(
        model, rows=rng.choice([1, 2, 3, 5]), capacity=capacity, store=ALL_STORES[rng.choice(list(ALL_STORES))],
        chunk=rng.choice([3, 8, 64]), prefix_cache=rng.random() < 0.7, speculation=METHODS[method](model),
        draft_tokens=rng.randint(1, 8),
    )  # fmt: skip
    requests = [engine.submit(ids, greedy()) for ids in rng.choices(prompts, k=rng.randint(1, 5))]
    while not engine.idle:
        engine.step()
        engine.store.check()
    for request in requests:
        assert [token.id for token in request.new] == output_alone(name, request.ids), (
            number,
            name,
            method,
            request.error,
        )
    return engine.metrics()["accepted_draft_tokens"]


@pytest.mark.ledger("spec.draft", "spec.medusa", "spec.eagle")
@pytest.mark.parametrize("part", range(3))
def test_a_few_trials(part: int) -> None:
    """Some of the thousand, with other models in each part."""
    assert sum(run_trial(i + len(MODELS) * j) for i in (7 * part, 7 * part + 1) for j in range(3)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_a_thousand_trials(part: int) -> None:
    assert sum(run_trial(number) for number in range(50 * part, 50 * part + 50)) > 0
