"""A failing request does not change the tokens of any other request, not even of a later one in the same row."""

import copy
from functools import partial

import pytest
import torch

from regard.engine.engine import Engine
from regard.engine.request import Request, Sampling
from regard.engine.sampling import sample
from regard.engine.stores.paged import Paged
from tests.engine.pools import small_store

BAD = 0  # the token whose embedding is NaN; padding often has this id too
PROMPTS = [[i, 3, 5 + i] * i for i in range(1, 7)]
GREEDY = Sampling(max_new=8, temperature=0)


@pytest.fixture
def poisoned(tiny):
    """poisoned(kind): a model whose embedding of token 0 is NaN."""

    def make(kind: str):
        model = copy.deepcopy(tiny(kind))
        # untied, so that the head has no NaN
        model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())
        with torch.no_grad():
            model.embedding.weight[BAD] = torch.nan
            model.head.weight[BAD] = 0  # never the most likely token
        return model

    return make


@pytest.mark.parametrize("store", ["contiguous", "paged"])
@pytest.mark.parametrize("kind", ["attention", "linear", "hybrid"])
def test_a_request_with_nan_does_not_affect_other_requests(poisoned, kind, store) -> None:
    model = poisoned(kind)
    reference = Engine(model, rows=1, store="contiguous")
    expected = [[token.id for token in reference.generate(ids, GREEDY)] for ids in PROMPTS]
    # few rows and blocks, and chunks of several ragged prompts: bad rows are padded, and their slots are reused
    engine = Engine(model, rows=3, store=small_store(store, 24), chunk=48, queue=99)
    healthy, bad = [], []
    for ids in PROMPTS * 3:
        bad.append(engine.submit([1, BAD, 2, 9][: 2 + len(bad) % 3], GREEDY))
        healthy.append(engine.submit(ids, GREEDY))
    engine.cancel(bad.pop())
    while not engine.idle:
        engine.step()
    assert [[token.id for token in request.new] for request in healthy] == expected * 3
    assert {(request.finish, len(request.new)) for request in bad} == {("error", 0)}
    assert "not finite" in bad[0].error
    assert engine.metrics()["error"] == len(bad)


@pytest.mark.parametrize("removal", ["cancel", "preempt"])
@pytest.mark.parametrize("store", ["contiguous", "paged"])
@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_a_row_freed_during_a_bad_prompt_can_be_used_again(poisoned, kind, store, removal) -> None:
    model = poisoned(kind)
    expected = Engine(model, rows=1).generate([4, 8], Sampling(max_new=30, temperature=0))
    engine = Engine(model, rows=1, store=small_store(store, 10), capacity=40, chunk=4)
    bad = engine.submit([BAD] * 30, GREEDY)
    for _ in range(5):
        engine.step()
    if removal == "preempt":
        engine.scheduler.preempt(bad)
    engine.cancel(bad)
    found = engine.generate([4, 8], Sampling(max_new=30, temperature=0))
    assert [token.id for token in found] == [token.id for token in expected]


@pytest.mark.parametrize("kind", ["attention", "linear", "hybrid"])
def test_an_error_in_a_forward_fails_only_the_requests_that_cause_it(tiny, kind) -> None:
    model = copy.deepcopy(tiny(kind))

    def fail_on_bad_tokens(module, inputs) -> None:  # in the last layer, after earlier ones have written their states
        if (model.current_tokens == BAD).any():
            raise RuntimeError("the layer broke\nwith details")

    def record_tokens(module, inputs) -> None:
        model.current_tokens = inputs[0]

    model.embedding.register_forward_pre_hook(record_tokens)
    model.stack.blocks[-1].sublayers[-1].body.register_forward_pre_hook(fail_on_bad_tokens)
    sampling = Sampling(max_new=8, temperature=0, stop_ids=(BAD,))
    reference = Engine(model, rows=1)
    expected = [[token.id for token in reference.generate(ids, sampling)] for ids in PROMPTS]
    engine = Engine(model, rows=4, chunk=40, store=partial(Paged, block=4, blocks=40))
    requests = [engine.submit(ids, sampling) for ids in PROMPTS[:3]]
    bad = [engine.submit([5, BAD, 7], sampling), engine.submit([BAD], sampling)]
    requests += [engine.submit(ids, sampling) for ids in PROMPTS[3:]]
    while not engine.idle:
        engine.step()
    assert [[token.id for token in request.new] for request in requests] == expected
    assert [request.error for request in bad] == ["the model failed on this request: the layer broke"] * 2
    assert engine.metrics()["free_blocks"] == 40
    with pytest.raises(RuntimeError, match="the layer broke"):
        engine.generate([BAD, 1], sampling)


def test_too_little_memory_for_sampling_fails_only_the_request_that_needs_it(tiny, monkeypatch) -> None:
    expected = [token.id for token in Engine(tiny(), rows=1).generate([1, 2], GREEDY)]

    def sample_or_fail(logits, requests, separately):
        if any(request.ids[0] == BAD for request in requests):
            raise torch.OutOfMemoryError("out of memory")
        return sample(logits, requests, separately)

    monkeypatch.setattr("regard.engine.engine.sample", sample_or_fail)
    engine = Engine(tiny(), rows=4)
    healthy, bad = engine.submit([1, 2], GREEDY), engine.submit([BAD, 2], GREEDY)
    while not engine.idle:
        engine.step()
    assert [token.id for token in healthy.new] == expected and bad.finish == "error" and not bad.new


def test_a_request_can_be_cancelled_by_a_processor(tiny) -> None:
    """It ends after the step, and so does a neighbour of its batch or of another batch of the step."""
    engine = Engine(tiny(), rows=4)
    cancelled: list[Request] = []

    def cancel(tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        if len(tokens) == 5:
            for request in cancelled:
                engine.cancel(request)
        return logits

    cancelled += [engine.submit([1, 2, 3], Sampling(max_new=9, processors=(cancel,))), engine.submit([7, 8, 9], GREEDY)]
    healthy = engine.submit([3, 4], GREEDY)
    for _ in range(2):
        engine.step()
    cancelled.append(engine.submit([5] * 40, GREEDY))  # its prompt is computed in the step that cancels it
    while not engine.idle:
        engine.step()
    assert [request.finish for request in cancelled] == ["cancelled"] * 3 and healthy.finish == "length"
    assert [len(request.new) for request in cancelled] == [3, 3, 1]
    assert engine.metrics()["cancelled"] == 3 and len(engine.scheduler.free_rows) == 4


def test_an_error_of_the_engine_itself_is_raised(tiny) -> None:
    model = copy.deepcopy(tiny())

    def raise_error(module, inputs):
        raise TypeError("a bug")

    model.norm.register_forward_pre_hook(raise_error)
    engine = Engine(model)
    with pytest.raises(TypeError, match="a bug"):
        engine.generate([1, 2], GREEDY)
    assert engine.idle
