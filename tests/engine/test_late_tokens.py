"""Tokens that are read one step late, as on a GPU, are those that are read at once."""

from functools import partial
from typing import Any

import pytest
import torch

from regard.engine.decode_graphs import DecodeGraphs
from regard.engine.engine import Engine
from regard.engine.request import UNREAD, Request, Sampling, Token
from regard.engine.stores.paged import Paged
from tests.engine.test_decode_graphs import MIXERS, build

VOCAB = 96


def late(model: Any, **options: Any) -> Engine:
    engine = Engine(model, **options)
    engine.lag = 1
    return engine


def settings_of(i: int) -> Sampling:
    """Plain settings for most requests, and some that need the earlier tokens."""
    options: dict[str, Any] = {"max_new": 1 + 5 * i % 13, "temperature": 0.0 if i % 3 else 1.0, "seed": i}
    if i % 5 == 1:
        options["stop_ids"] = tuple(range(0, VOCAB, 3))
    if i % 7 == 2:
        options |= {"repetition_penalty": 1.3, "bad_words": ((1,), (2, 3))}
    if i % 7 == 4:
        options |= {"top_logprobs": 3, "logit_bias": {5: 2.0}, "stop_sequences": ((7,), (9, 11))}
    if i % 7 == 6:
        options |= {"top_p": 0.8, "top_k": 30, "prompt_logprobs": 1}
    return Sampling(**options)


def rounded(tokens: list[Token]) -> list[tuple]:
    """Sums of float64 in batches of different sizes differ in the last digits."""
    return [(t.id, round(t.logprob, 9), [(id, round(x, 9)) for id, x in t.top_logprobs], t.finish) for t in tokens]


def run(engine: Engine) -> list[tuple[Any, ...]]:
    """Requests that join while others run; what each got, and what the steps returned."""
    generator = torch.Generator().manual_seed(0)
    shared = torch.randint(VOCAB, (20,), generator=generator).tolist()
    requests: list[Request] = []
    returned: dict[Request, list] = {}

    def step() -> None:
        for request, token in engine.step():
            returned.setdefault(request, []).append(token)
        engine.store.check()

    for i in range(16):
        own = torch.randint(VOCAB, (1 + 7 * i % 23,), generator=generator).tolist()
        requests.append(engine.submit(shared + own if i % 2 else own, settings_of(i)))
        for _ in range(i % 3):
            step()
    while not engine.idle:
        step()
    assert all(returned.get(request, []) == request.new for request in requests)
    assert all(UNREAD not in request.tokens for request in requests)
    return [(rounded(request.new), request.finish, rounded(request.prompt_logprobs)) for request in requests]


@pytest.mark.parametrize("name", MIXERS)
def test_late_tokens_equal_tokens_read_at_once(name: str) -> None:
    model = build(name, "cpu", torch.float64)
    options: dict[str, Any] = {"rows": 4, "capacity": 64, "chunk": 16}
    assert run(late(model, **options)) == run(Engine(model, **options))


def test_late_tokens_with_preemption() -> None:
    model = build("attention", "cpu", torch.float64)
    options: dict[str, Any] = {"rows": 6, "capacity": 64, "store": partial(Paged, blocks=9, block=8)}
    engine = late(model, **options)
    assert run(engine) == run(Engine(model, rows=6, capacity=64))
    assert engine.scheduler.preemptions > 0


def test_late_tokens_of_compiled_steps() -> None:
    model = build("attention", "cpu", torch.float64)
    engine = late(model, rows=4, capacity=64)
    engine.runner.compiled = engine.runner.decode_step
    assert run(engine) == run(Engine(model, rows=4, capacity=64))


def test_a_step_starts_before_the_tokens_of_the_last_one_are_read() -> None:
    engine = late(build("attention", "cpu", torch.float32), rows=2, capacity=64)
    request = engine.submit([1, 2, 3], Sampling(max_new=3, temperature=0))
    steps = [[token.id for _, token in engine.step()] for _ in range(4)]
    assert [len(ids) for ids in steps] == [0, 1, 1, 1]
    assert request.finish == "length" and engine.idle


def test_a_full_context_is_not_exceeded() -> None:
    model = build("attention", "cpu", torch.float64)
    for length in (1, 15, 31):
        results = []
        for engine in (late(model, rows=2, capacity=32), Engine(model, rows=2, capacity=32)):
            request = engine.submit([3] * length, Sampling(max_new=100, temperature=0))
            while not engine.idle:
                engine.step()
            results.append(([token.id for token in request.new], request.finish))
        assert results[0] == results[1]
        assert len(results[0][0]) == 32 - length


def test_a_token_after_the_last_is_dropped() -> None:
    model = build("attention", "cpu", torch.float64)
    engine = late(model, rows=2, capacity=64)
    first = engine.generate([5, 6], Sampling(max_new=4, temperature=0))
    request = engine.submit([5, 6], Sampling(max_new=50, temperature=0, stop_ids=(first[1].id,)))
    while not engine.idle:
        engine.step()
    engine.submit([8], Sampling(max_new=2, temperature=0))  # takes the row whose last result is not read yet
    while not engine.idle:
        engine.step()
    assert [token.id for token in request.new] == [token.id for token in first[:2]]
    assert request.finish == "stop"


def test_a_cancelled_request_keeps_the_tokens_that_were_read() -> None:
    engine = late(build("attention", "cpu", torch.float64), rows=2, capacity=64)
    request, other = (engine.submit([i + 1], Sampling(max_new=9, temperature=0)) for i in range(2))
    for _ in range(4):
        engine.step()
    engine.cancel(request)
    while not engine.idle:
        engine.step()
    assert len(request.new) == 3 and len(other.new) == 9
    engine.store.check()


def test_a_failed_batch_loses_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("attention", "cpu", torch.float64)
    expected = [Engine(model, capacity=64).generate([i + 1], Sampling(max_new=9, temperature=0)) for i in range(3)]
    engine = late(model, rows=4, capacity=64)
    requests = [engine.submit([i + 1], Sampling(max_new=9, temperature=0)) for i in range(3)]
    forward, calls = engine.runner.forward, []

    def fail_once(batch: Any) -> torch.Tensor:
        calls.append(batch)
        if len(calls) == 4:
            raise RuntimeError("out of memory")
        return forward(batch)

    monkeypatch.setattr(engine.runner, "forward", fail_once)
    while not engine.idle:
        engine.step()
    assert [rounded(request.new) for request in requests] == [rounded(tokens) for tokens in expected]
    assert engine.scheduler.preemptions == 3


def test_a_search_reads_the_tokens_first() -> None:
    from regard.engine.beam import Beams

    model = build("attention", "cpu", torch.float64)
    engine = late(model, rows=3, capacity=64)
    requests = [engine.submit([i + 1], Sampling(max_new=9, temperature=0)) for i in range(3)]
    for _ in range(3):
        engine.step()
    found = engine.beam_search([4, 5], Beams(3), Sampling(max_new=5, temperature=0))
    while not engine.idle:
        engine.step()
    alone = Engine(model, rows=3, capacity=64)
    expected = alone.beam_search([4, 5], Beams(3), Sampling(max_new=5, temperature=0))
    assert [beam.ids for beam in found] == [beam.ids for beam in expected]
    alone_tokens = [alone.generate([i + 1], requests[0].sampling) for i in range(3)]
    assert [rounded(request.new) for request in requests] == [rounded(tokens) for tokens in alone_tokens]


def test_a_waiting_request_runs_after_the_last_token_of_another_is_read() -> None:
    """The row becomes free when that token is read, after the requests of the step were admitted."""
    engine = late(build("attention", "cpu", torch.float64), rows=1, capacity=32)
    requests = [engine.submit([i, 2, 3], Sampling(max_new=1)) for i in range(3)]
    while not engine.idle:
        engine.step()
    assert [request.finish for request in requests] == ["length"] * 3


def test_the_warm_up_of_prompts_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.engine.test_decode_graphs import repeat_step

    monkeypatch.setattr(DecodeGraphs, "record", repeat_step)
    monkeypatch.setattr("regard.engine.engine.WARM_UP_PROMPTS", ((5,), (9, 17), (500,)))
    engine = late(build("hybrid", "cpu", torch.float64), rows=3, capacity=64)
    engine.runner.graphs = DecodeGraphs(engine.runner.decode_step, 3, torch.device("cpu"))
    before = engine.metrics()
    engine.warm_up()
    assert engine.metrics() == before
    engine.store.check()
