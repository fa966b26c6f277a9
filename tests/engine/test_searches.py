"""Searches advance with the steps of the engine, one forward per step, so other requests go on."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from regard.engine.beam import Beams
from regard.engine.contrastive import ContrastiveOptions
from regard.engine.engine import Engine
from regard.engine.request import GenerationError, Sampling

GREEDY = Sampling(max_new=6, temperature=0)
SEARCHES: dict[str, Callable[[Engine, list[int], Sampling], Any]] = {
    "beam": lambda engine, ids, sampling: engine.beam_search(ids, Beams(3), sampling),
    "contrastive": lambda engine, ids, sampling: engine.contrastive_search(ids, ContrastiveOptions(3), sampling),
}


def prompt(length: int) -> list[int]:
    return random.Random(length).choices(range(61), k=length)


@pytest.fixture(params=SEARCHES)
def search(request: pytest.FixtureRequest) -> Callable[[Engine, list[int], Sampling], Any]:
    return SEARCHES[request.param]


def test_a_request_gets_a_token_per_forward_of_a_search(tiny, search: Callable) -> None:
    engine, alone = Engine(tiny(), rows=4, chunk=8), Engine(tiny(), rows=3)
    request = engine.submit(prompt(5), Sampling(max_new=40, temperature=0))
    engine.step()
    found = search(engine, prompt(30), GREEDY)
    assert len(request.new) >= 1 + 4 + 5  # chunks of the prompt, new tokens
    late = engine.submit(prompt(6), GREEDY)
    while not engine.idle:
        engine.step()
    for each in (request, late):
        assert [token.id for token in each.new] == [token.id for token in alone.generate(each.ids, each.sampling)], (
            "the search changed the tokens of a request"
        )
    expected = search(alone, prompt(30), GREEDY)
    assert [getattr(each, "ids", each[0]) for each in found] == [getattr(each, "ids", each[0]) for each in expected]


def test_a_search_that_fails_or_is_interrupted_gives_its_rows_back(tiny, search: Callable) -> None:
    errors: list[BaseException] = []

    def fail(tokens: Any, logits: Any) -> Any:
        raise errors[-1]

    engine = Engine(tiny(), rows=4)
    request = engine.submit(prompt(5), GREEDY)
    failing = Sampling(max_new=6, temperature=0, processors=(fail,))
    for error, raised in ((KeyError("x"), GenerationError), (KeyboardInterrupt(), KeyboardInterrupt)):
        errors.append(error)
        with pytest.raises(raised):
            search(engine, prompt(9), failing)
        assert not engine.searches.queue and len(engine.scheduler.free_rows) == 3
    while not engine.idle:
        engine.step()
    assert request.finish == "length" and engine.metrics()["free_blocks"] == engine.metrics()["blocks"]
