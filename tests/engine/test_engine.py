"""Requests join, wait, are preempted and finish; wrong prompts and sizes are refused."""

import random
from functools import partial

import pytest
import torch

from regard.engine.engine import Engine
from regard.engine.request import GenerationError, QueueFull, Sampling
from regard.engine.stores import STORES
from regard.engine.stores.contiguous import Contiguous
from regard.engine.stores.paged import Paged
from regard.layout import TokenLayout
from regard.models.decoder import Decoder
from regard.models.presets import transformer_2017
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.position.rope import Rope
from regard.parts.position.rope_scaling import DynamicNTK, LongRope, Scaling

GREEDY = Sampling(max_new=6, temperature=0)


def ids_of(request) -> list[int]:
    return [token.id for token in request.new]


def drain(engine: Engine) -> None:
    while not engine.idle:
        engine.step()


@pytest.mark.parametrize("store", ["contiguous", "paged"])
def test_a_request_ends_by_stop_id_length_or_capacity(tiny, store) -> None:
    engine = Engine(tiny(), store=store, capacity=20)
    unstopped = engine.generate([1, 2, 3], GREEDY)
    assert len(unstopped) == 6 and [token.finish for token in unstopped] == [None] * 5 + ["length"]
    stop = unstopped[3].id
    stopped = engine.generate([1, 2, 3], Sampling(max_new=6, temperature=0, stop_ids=(stop,)))
    first = [token.id for token in unstopped].index(stop)
    assert [token.id for token in stopped] == [token.id for token in unstopped[: first + 1]]
    assert stopped[-1].finish == "stop"
    full = engine.generate([1] * 15, Sampling(max_new=100, temperature=0))
    assert len(full) == 5 and full[-1].finish == "length"  # prompt and new tokens fill the capacity
    assert engine.idle and engine.step() == []


def test_a_long_prompt_does_not_block_decoding(tiny) -> None:
    engine = Engine(tiny(), chunk=4)
    decoding = engine.submit([1, 2], Sampling(max_new=30, temperature=0))
    engine.step()
    prefilling = engine.submit(list(range(40)), GREEDY)
    for _ in range(13):  # one of the four tokens of a step is decoded, so the fourteenth chunk ends the prompt
        assert [request for request, _ in engine.step()] == [decoding]
    assert {id(request) for request, _ in engine.step()} == {id(decoding), id(prefilling)}


def test_logits_are_computed_for_the_last_position_only(tiny) -> None:
    model, shapes = tiny(), []
    hook = model.head.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape)))
    engine = Engine(model, chunk=64)
    engine.submit(list(range(50)), GREEDY)
    engine.submit([1, 2, 3], GREEDY)
    drain(engine)
    hook.remove()
    assert all(shape in {(1, 61), (2, 61)} for shape in shapes)


def test_a_store_has_its_capacity_if_blocks_do_not_divide_it(tiny) -> None:
    """Also for spans of 64 slots, which blocks of twelve do not divide either."""
    for capacity in (25, 99):
        engine = Engine(tiny(), rows=2, capacity=capacity, store=partial(Paged, block=12))
        assert engine.capacity == capacity and engine.store.capacity >= capacity
        ids, sampling = list(range(20)), Sampling(max_new=capacity, temperature=0)
        found = engine.generate(ids, sampling)
        assert len(found) == capacity - len(ids)
        expected = Engine(tiny(), rows=1, capacity=capacity, store="contiguous").generate(ids, sampling)
        assert [token.id for token in found] == [token.id for token in expected]


def test_requests_start_in_order_of_arrival(tiny) -> None:
    """Shorter requests that would fit earlier do not overtake longer ones."""
    engine = Engine(tiny(), rows=2, capacity=32, store=partial(Paged, block=4, blocks=8))
    lengths = [9, 14, 20, 3, 17, 1]
    requests = [engine.submit([i] * length, GREEDY) for i, length in enumerate(lengths)]
    started = []
    while not engine.idle:
        engine.step()
        started += [request for request in requests if request.row is not None and request not in started]
    assert started == requests and engine.metrics()["length"] == 6


def test_the_latest_arrival_is_preempted_and_resumes_first(tiny) -> None:
    engine = Engine(tiny(), rows=3, capacity=24, store=partial(Paged, block=4, blocks=6))
    first, second, third = (engine.submit([i] * 7, Sampling(max_new=12, temperature=0)) for i in (1, 2, 3))
    while engine.metrics()["preemptions"] == 0:
        engine.step()
    assert first.row is not None and second.row is not None
    assert third.row is None and third.cached == 0
    drain(engine)
    for request in (first, second, third):
        expected = Engine(tiny(), rows=1).generate(request.ids, request.sampling)
        assert ids_of(request) == [token.id for token in expected]
    assert engine.metrics()["free_blocks"] == 6


def test_a_preempted_request_is_not_overtaken(tiny) -> None:
    """The third request would fit into the blocks that the second one freed, but has to wait."""
    engine = Engine(tiny(), rows=2, capacity=24, store=partial(Paged, block=4, blocks=6))
    first, second, third = (engine.submit([i] * 7, Sampling(max_new=12, temperature=0)) for i in (1, 2, 3))
    while engine.metrics()["preemptions"] == 0:
        engine.step()
    assert first.row is not None and second.row is None and engine.metrics()["free_blocks"] == 2
    finished = []
    while not engine.idle:
        assert third.row is None or second.row is not None or second.finish
        finished += [request for request, token in engine.step() if token.finish]
    assert finished == [first, second, third]


@pytest.mark.parametrize("block", [1, 5, 12, 16])
def test_blocks_of_any_size_generate_the_same_tokens(tiny, block) -> None:
    rng = random.Random(0)
    prompts = [rng.choices(range(61), k=length) for length in (1, 29, 56, 57, 58)]
    engine = Engine(tiny(), rows=5, capacity=64, store=partial(Paged, block=block))
    requests = [engine.submit(ids, GREEDY) for ids in prompts]
    drain(engine)
    for request in requests:
        expected = Engine(tiny(), rows=1, capacity=64, store="contiguous").generate(request.ids, request.sampling)
        assert ids_of(request) == [token.id for token in expected]
        assert [token.logprob for token in request.new] == pytest.approx(
            [token.logprob for token in expected], abs=1e-9
        )


@pytest.mark.ledger("kv.paged")
def test_a_sequence_wastes_less_than_a_block(tiny) -> None:
    engine = Engine(tiny(), rows=3, capacity=40, store=partial(Paged, block=4, blocks=30))
    requests = [engine.submit([i] * (5 * i), Sampling(max_new=9, temperature=0)) for i in (1, 2, 3)]
    while not engine.idle:
        engine.step()
        for request in requests:
            if request.row is not None:
                reserved = 4 * len(engine.store.owned[request.row])
                assert request.cached <= reserved < request.cached + 4
    assert engine.metrics()["free_blocks"] == 30


def test_a_full_queue_refuses_requests(tiny) -> None:
    engine = Engine(tiny(), rows=2, queue=3)
    requests = [engine.submit([1], GREEDY) for _ in range(5)]
    with pytest.raises(QueueFull, match="3 requests may wait, too few for 1 more; try again"):
        engine.submit([1], GREEDY)
    engine.cancel(requests[4])
    engine.submit([2], GREEDY)
    drain(engine)
    assert engine.metrics()["cancelled"] == 1 and engine.metrics()["length"] == 5


def test_waiting_and_running_requests_can_be_cancelled(tiny) -> None:
    engine = Engine(tiny(), rows=1)
    running, waiting = engine.submit([1, 2], GREEDY), engine.submit([3], GREEDY)
    engine.step()
    engine.cancel(running)
    engine.cancel(running)  # a second cancel has no effect
    assert running.finish == "cancelled" and len(running.new) == 1
    engine.cancel(waiting)
    assert engine.idle and waiting.new == [] and engine.metrics()["cancelled"] == 2
    finished = engine.submit([4], GREEDY)
    drain(engine)
    engine.cancel(finished)
    assert finished.finish == "length"


def test_wrong_prompts_are_refused(tiny) -> None:
    engine = Engine(tiny(), capacity=16)
    for ids, message in [
        ([], "the prompt is empty; at least one token is needed"),
        ([1] * 16, "the prompt has 16 tokens, but prompt and new tokens must fit into 16; shorten it"),
        ([1, 61], "the prompt has id 61; the model's ids are 0 to 60"),
        ([-1], "the prompt has id -1"),
        ([0.5], "the prompt must be integers from 0 to 60"),
        (["a"], "the prompt must be integers from 0 to 60"),
        (5, "the prompt is 5, not a sequence of token ids"),
        ([2**70], "the prompt has id"),
    ]:
        with pytest.raises(ValueError, match=message):
            engine.submit(ids, GREEDY)
    assert engine.idle and engine.metrics()["prompt_tokens"] == 0
    assert engine.submit(torch.tensor([1, 2]), GREEDY).ids == (1, 2)


def test_wrong_sizes_are_refused(tiny) -> None:
    wrong = [{"rows": 0}, {"capacity": 0}, {"capacity": "64"}, {"capacity": 64.5}, {"chunk": 0}, {"queue": 0}]
    for sizes in wrong:
        with pytest.raises(ValueError, match="must be a positive integer"):
            Engine(tiny(), **sizes)
    with pytest.raises(ValueError, match="exceeds the model's context=128"):
        Engine(tiny(), capacity=129)
    with pytest.raises(ValueError, match="did you mean 'paged'"):
        Engine(tiny(), store="page")
    opened = Contiguous(tiny().spec.memory(), 2, 64, torch.float64)
    with pytest.raises(ValueError, match="store is an object of class Contiguous; give a name"):
        Engine(tiny(), store=opened)


def test_a_request_of_another_engine_cannot_be_cancelled(tiny) -> None:
    engine, other = Engine(tiny()), Engine(tiny())
    waiting, running = other.submit([1], GREEDY), other.submit([2], GREEDY)
    for request in (waiting, running):
        with pytest.raises(ValueError, match="was not submitted to this engine"):
            engine.cancel(request)
        other.step()
    drain(other)
    assert len(waiting.new) == len(running.new) == 6 and engine.metrics()["cancelled"] == 0
    engine.cancel(running)  # it has finished


class LimitedStore(Contiguous):
    """A store with less space than its `max_tokens` promises."""

    limit = 0

    def reserve(self, row: int, length: int) -> bool:
        return length <= self.limit and super().reserve(row, length)


@pytest.mark.parametrize("limit", [0, 4])
def test_a_request_that_cannot_be_scheduled_fails(tiny, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(LimitedStore, "limit", limit)
    engine = Engine(tiny(), store=LimitedStore, capacity=32)
    with pytest.raises(GenerationError, match="the store has no space for the [35] tokens of this request"):
        engine.generate([1, 2, 3], GREEDY)
    assert engine.idle and engine.metrics()["error"] == 1


def test_few_blocks_limit_the_capacity(tiny) -> None:
    engine = Engine(tiny(), store=partial(Paged, block=4, blocks=5))
    assert engine.capacity == 20
    assert len(engine.generate([1] * 12, Sampling(max_new=99, temperature=0))) == 8


def test_metrics_count_requests_blocks_and_tokens(tiny) -> None:
    engine = Engine(tiny(), rows=2, store=partial(Paged, block=16, blocks=8))
    engine.submit([1, 2, 3], GREEDY)
    engine.submit([4], GREEDY)
    engine.submit([5], GREEDY)
    engine.step()
    metrics = engine.metrics()
    assert all(isinstance(value, int) for value in metrics.values())
    expected = {
        "running": 2,
        "waiting": 1,
        "rows": 2,
        "blocks": 8,
        "free_blocks": 6,
        "prompt_tokens": 5,
        "new_tokens": 2,
    }
    assert expected.items() <= metrics.items()
    drain(engine)
    assert engine.metrics()["new_tokens"] == 18 and engine.metrics()["length"] == 3


@pytest.mark.parametrize("sizes", [{"blocks": -1}, {"block": 0}])
def test_a_paged_store_needs_blocks(tiny, sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="paged store: blocks?=(-1|0) must be positive"):
        Engine(tiny(), store=partial(Paged, **sizes))


FACTORS = (1.0,) * 4
SCALINGS = [DynamicNTK(factor=2.0, length=64), LongRope(FACTORS, FACTORS, 2.0, 64)]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling.kind)
def test_the_capacity_is_at_most_the_length_that_is_cached_exactly(scaling: Scaling) -> None:
    """The rotations of all keys change once a sequence has grown past the trained length."""
    attention = Attention(4, position=Rope(scaling=scaling))
    model = Decoder(vocab=61, width=32, layers=(Repeat((Block((Sublayer(attention),)),)),), context=128).build(seed=0)
    assert Engine(model).capacity == 64
    assert len(Engine(model).generate([1, 2, 3], Sampling(max_new=100, temperature=0))) == 61
    with pytest.raises(ValueError, match=r"capacity=65.* exactly up to 64 tokens only.*\(--context\) of at most 64"):
        Engine(model, capacity=65)


@pytest.mark.parametrize("kind", STORES)
def test_a_store_refuses_tokens_past_the_length_that_is_cached_exactly(kind: str) -> None:
    attention = Attention(4, position=Rope(scaling=SCALINGS[0]))
    model = Decoder(vocab=61, width=32, layers=(Repeat((Block((Sublayer(attention),)),)),), context=128).build(seed=0)
    store = STORES[kind](model.spec.memory(), 1, 128, torch.float32)
    assert store.reserve(0, 128)
    store.begin_forward(TokenLayout.whole(1, 64))
    with pytest.raises(ValueError, match="row 0: position 64, but this model is cached exactly up to 64 tokens only"):
        store.begin_forward(TokenLayout(torch.tensor([[64]])))


def test_a_model_that_cannot_generate_is_refused() -> None:
    model = transformer_2017(vocab=61, width=32, heads=4, hidden=40, layers=1).build(seed=0)
    with pytest.raises(ValueError, match="of kind encoder and does not generate text"):
        Engine(model.source)
    with pytest.raises(ValueError, match="cross_attention reads a source; give the engine the whole encoder-decoder"):
        Engine(model.target)
