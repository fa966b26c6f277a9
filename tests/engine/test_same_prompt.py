"""Requests with the same prompt: it is computed once, and each request gets the tokens that it gets alone."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from regard.engine.engine import Engine
from regard.engine.namespace import embedding_keys
from regard.engine.request import QueueFull, Request, Sampling, derived_seed
from regard.engine.runner import Runner
from regard.engine.stores.paged import Paged

PROMPT = list(range(30))
SAMPLING = Sampling(max_new=6, temperature=20.0, seed=2**64 - 2)


def ids_of(request: Request) -> list[int]:
    return [token.id for token in request.new]


def drain(engine: Engine) -> None:
    while not engine.idle:
        engine.step()


@pytest.fixture
def count_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of every forward. Not a forward hook: with one, no prefix is shared."""
    counts, forward = [], Runner.forward

    def counted(self, batch):
        counts.append(sum(length for _, length in batch))
        return forward(self, batch)

    monkeypatch.setattr(Runner, "forward", counted)
    return counts


@pytest.mark.parametrize("store", ["paged", "contiguous"])
@pytest.mark.parametrize("kind", ["attention", "linear", "hybrid"])
def test_each_choice_equals_a_request_with_its_seed(tiny, kind: str, store: str) -> None:
    requests = (engine := Engine(tiny(kind), rows=4, store=store, chunk=8)).submit_n(PROMPT, SAMPLING, 6)
    drain(engine)
    alone = Engine(tiny(kind), rows=1, store="contiguous")
    expected = [alone.generate(PROMPT, replace(SAMPLING, seed=seed)) for seed in (2**64 - 2, 2**64 - 1, 0, 1, 2, 3)]
    assert [ids_of(request) for request in requests] == [[token.id for token in tokens] for tokens in expected]
    assert len(set(map(tuple, map(ids_of, requests)))) > 3


def test_the_prompt_is_computed_once(tiny, count_tokens: list[int]) -> None:
    engine = Engine(tiny(), store=partial(Paged, block=4), chunk=8)
    requests = engine.submit_n(PROMPT, SAMPLING, 5)
    drain(engine)
    assert sum(count_tokens) == 30 + 4 * 2 + 5 * 5  # the last block is not full: two tokens are computed again
    assert not any(request.held for request in requests)


def test_the_others_start_if_the_first_is_cancelled(tiny, count_tokens: list[int]) -> None:
    engine = Engine(tiny(), store=partial(Paged, block=4), chunk=8)
    requests = engine.submit_n(PROMPT, SAMPLING, 3)
    engine.step()
    assert [request.row is None for request in requests] == [False, True, True]
    engine.cancel(requests[0])
    drain(engine)
    alone = Engine(tiny(), rows=1).generate(PROMPT, replace(SAMPLING, seed=0))
    assert ids_of(requests[2]) == [token.id for token in alone]


def test_requests_that_cannot_share_do_not_wait(tiny) -> None:
    for options, submitted in [
        ({}, [{"salt": "a"}, {"salt": "b"}]),
        ({"prefix_cache": False}, [{}, {}]),
        ({"store": "contiguous"}, [{}, {}]),
    ]:
        engine = Engine(tiny(), **options)
        requests = [engine.submit(PROMPT, SAMPLING, **each) for each in submitted]
        engine.step()
        assert all(request.row is not None for request in requests), options
    engine = Engine(tiny())
    requests = engine.submit_n(PROMPT, replace(SAMPLING, prompt_logprobs=0), 2)
    drain(engine)
    assert all(len(request.prompt_logprobs) == 29 for request in requests)
    short = engine.submit_n([1, 2, 3], SAMPLING, 2)
    engine.step()
    assert all(request.row is not None for request in short)


def test_a_waiting_request_with_another_prompt_overtakes(tiny) -> None:
    engine = Engine(tiny(), rows=2, store=partial(Paged, block=4), chunk=8)
    first, second = engine.submit_n(PROMPT, SAMPLING, 2)
    other = engine.submit([5, 6], SAMPLING)
    engine.step()
    assert second.row is None and other.row is not None
    drain(engine)
    assert len(first.new) == len(second.new) == len(other.new) == 6


def test_all_or_none_are_submitted(tiny) -> None:
    engine = Engine(tiny(), rows=1, queue=3)
    with pytest.raises(QueueFull, match="3 requests may wait, too few for 5 more"):
        engine.submit_n(PROMPT, SAMPLING, 5)
    with pytest.raises(ValueError, match="n=0 must be a positive integer"):
        engine.submit_n(PROMPT, SAMPLING, 0)
    assert engine.idle and len(engine.submit_n(PROMPT, SAMPLING, 4)) == 4
    assert derived_seed(None, 3) is None and derived_seed(-1, 3) is None and derived_seed(-2, 1) == 2**64 - 1


def test_embeddings_are_copied_to_the_host_and_hashed_once(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []
    monkeypatch.setattr(
        "regard.engine.request_builder.embedding_keys", lambda *args: hashed.append(args) or embedding_keys(*args)
    )
    engine, values = Engine(tiny(), rows=4), torch.randn(len(PROMPT), 32, dtype=torch.float64)
    requests = engine.submit_n(PROMPT, SAMPLING, 3, embeddings=values)
    requests.append(engine.submit(PROMPT, SAMPLING, embeddings=engine.prompt_embeddings(PROMPT, values)))
    assert len(hashed) == 2 and requests[0].prompt_keys is requests[2].prompt_keys
    assert all(request.embeddings is not None and request.embeddings.device.type == "cpu" for request in requests)
    while not engine.idle:
        engine.step()
    tokens = [[token.id for token in request.new] for request in requests]
    assert tokens[3] == tokens[0] != tokens[1]
