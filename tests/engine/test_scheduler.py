"""Which request runs next: a budget of tokens, priorities, fairness between tenants, deadlines."""

import random
from functools import partial

import pytest

from regard.engine import inputs, scheduler
from regard.engine.engine import Engine
from regard.engine.request import Request, Sampling
from regard.engine.stores.paged import Paged
from regard.engine.waiting import WaitingQueue

GREEDY = Sampling(max_new=4, temperature=0)


def prompts(count: int, length: int = 5) -> list[list[int]]:
    rng = random.Random(count)
    return [rng.choices(range(61), k=length) for _ in range(count)]


def start_order(engine: Engine, requests: list[Request]) -> list[Request]:
    started: list[Request] = []
    while not engine.idle:
        engine.step()
        started += [request for request in requests if request.row is not None and request not in started]
    return started


@pytest.mark.ledger("eng.phases", exact=True)
@pytest.mark.parametrize("kind", ["attention", "hybrid"])
@pytest.mark.parametrize(("chunk", "longest"), [(16, 16), (999, 5 * 100 + 3)])
def test_decoding_requests_get_a_token_in_every_step(tiny, kind: str, chunk: int, longest: int) -> None:
    """Long prompts keep arriving. In chunks, a step never computes more than its budget, so decoding does not wait for
    them; otherwise it computes whole prompts before the next token."""
    engine = Engine(tiny(kind), rows=8, chunk=chunk, prefix_cache=False)
    decoding = [engine.submit(ids, Sampling(max_new=60, temperature=0)) for ids in prompts(3)]
    while not all(request.new for request in decoding):
        engine.step()
    sizes, plan = [], engine.scheduler.plan

    def recorded_plan():
        batches = plan()
        sizes.append(sum(length for batch in batches for _, length in batch))
        return batches

    engine.scheduler.plan = recorded_plan
    for i, ids in enumerate(prompts(20, length=100)):
        engine.submit(ids, Sampling(max_new=2, temperature=0))
        for _ in range(2 if i >= 5 else 0):
            produced = [request for request, _ in engine.step()]
            assert all(request in produced for request in decoding)
    assert max(sizes) == longest
    assert engine.metrics()["length"] > 0  # prompts have been completed meanwhile


def test_many_decoding_requests_do_not_block_a_prompt(tiny) -> None:
    engine = Engine(tiny(), rows=9, chunk=8)
    for ids in prompts(8):
        engine.submit(ids, Sampling(max_new=40, temperature=0))
    while sum(len(request.new) > 0 for request in engine.scheduler.running) < 8:
        engine.step()
    late = engine.submit(prompts(1, length=12)[0], GREEDY)
    for _ in range(6):  # a quarter of eight tokens per step
        assert not late.new
        engine.step()
    assert len(late.new) == 1


def test_lower_priority_values_go_first(tiny) -> None:
    engine = Engine(tiny(), rows=1)
    priorities = [0, 3, 0, -1, 3, -1]
    requests = [engine.submit(ids, GREEDY, priority=p) for ids, p in zip(prompts(6), priorities, strict=True)]
    assert start_order(engine, requests) == sorted(requests, key=lambda request: (request.priority, request.arrival))


def test_the_latest_of_the_lowest_priority_is_preempted(tiny) -> None:
    engine = Engine(tiny(), rows=3, capacity=24, store=partial(Paged, block=4, blocks=6))
    sampling = Sampling(max_new=12, temperature=0)
    first, urgent = engine.submit([1] * 7, sampling, priority=1), engine.submit([2] * 7, sampling, priority=0)
    last = engine.submit([3] * 7, sampling, priority=1)
    while engine.metrics()["preemptions"] == 0:
        engine.step()
    assert first.row is not None and urgent.row is not None and last.preempted
    while engine.metrics()["preemptions"] == 1:
        engine.step()
    assert urgent.row is not None and first.preempted
    while not engine.idle:
        engine.step()
    for request in (first, urgent, last):
        expected = Engine(tiny(), rows=1).generate(request.ids, sampling)
        assert [token.id for token in request.new] == [token.id for token in expected]


def test_a_preempted_request_resumes_before_others_of_its_priority() -> None:
    queue = WaitingQueue()

    def wait(arrival: int, tenant: str, preempted: bool = False, priority: int = 0) -> Request:
        request = Request((1,), GREEDY, tenant=tenant, priority=priority, arrival=arrival, preempted=preempted)
        queue.join(request)
        return request

    earlier, preempted = wait(0, "a"), wait(1, "a", preempted=True)
    assert queue.first() is preempted
    queue.charge("a", 100)
    other = wait(2, "b")
    queue.charge("a", 100)  # tenant b has been served less
    assert queue.first() is preempted
    assert queue.first(lambda request: request is not preempted) is other
    urgent = wait(3, "a", priority=-1)
    assert queue.first() is urgent
    for request in (urgent, preempted, other):
        queue.remove(request)
    assert list(queue) == [earlier]


def test_a_tenant_with_many_requests_does_not_delay_others(tiny) -> None:
    engine = Engine(tiny(), rows=2, queue=1100)
    many = [engine.submit(ids, GREEDY, tenant="many") for ids in prompts(1000)]
    while not any(request.finish for request in many):
        engine.step()
    few = [engine.submit(ids, GREEDY, tenant="few") for ids in prompts(3)]
    steps = 0
    while not all(request.finish for request in few):
        engine.step()
        steps += 1
    assert steps <= 4 * (len(few) + 1)  # one of the two rows is theirs
    between = sum(request.finish is not None for request in many)
    assert between >= 3  # and the other row is not
    for request in many:
        engine.cancel(request)
    assert engine.idle and not engine.scheduler.waiting.served


def test_tenants_are_served_equal_numbers_of_tokens(tiny) -> None:
    """One tenant's requests are four times as long, so it gets a quarter of the starts."""
    engine = Engine(tiny(), rows=1, prefix_cache=False)
    long = [engine.submit(ids, GREEDY, tenant="long") for ids in prompts(10, length=44)]
    short = [engine.submit(ids, GREEDY, tenant="short") for ids in prompts(40, length=8)]
    order = start_order(engine, long + short)
    assert 3 <= sum(request in long for request in order[:20]) <= 5


def test_a_tenant_that_returns_has_saved_nothing_up(tiny) -> None:
    engine = Engine(tiny(), rows=1)
    steady = [engine.submit(ids, GREEDY, tenant="steady") for ids in prompts(12)]
    while sum(request.finish is not None for request in steady) < 6:
        engine.step()
    returning = [engine.submit(ids, GREEDY, tenant="returning") for ids in prompts(6, length=6)]
    order = start_order(engine, steady[7:] + returning)
    assert sum(request in returning for request in order[:6]) <= 4


def test_a_deadline_ends_waiting_and_running_requests(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    for module in (inputs, scheduler):
        monkeypatch.setattr(module, "monotonic", lambda: now[0])
    engine = Engine(tiny(), rows=1)
    running, waiting, unlimited = (
        engine.submit(ids, GREEDY, deadline=deadline) for ids, deadline in zip(prompts(3), (5, 3, None), strict=True)
    )
    engine.step()
    now[0] = 103.0
    engine.step()
    assert waiting.finish == "timeout" and running.finish is None and len(running.new) == 2
    now[0] = 105.0
    engine.step()
    assert running.finish == "timeout" and len(running.new) == 2 and running.error is None
    while not engine.idle:
        engine.step()
    assert unlimited.finish == "length" and engine.metrics()["timeout"] == 2
    assert engine.metrics()["free_blocks"] == engine.metrics()["blocks"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deadline": 0}, "deadline=0 must be a positive number of seconds"),
        ({"deadline": float("nan")}, "deadline=nan must be a positive"),
        ({"deadline": "1"}, "deadline='1' must be a positive"),
        ({"salt": 3}, "salt=3 must be a string"),
        ({"embeddings": [[0.5]]}, "the embeddings have shape list; this prompt needs a tensor of shape"),
        ({"priority": "high"}, "priority='high' must be an integer; lower values go first"),
        ({"tenant": 3}, "tenant=3 must be a string"),
    ],
)
def test_wrong_scheduling_options_are_refused(tiny, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(tiny()).submit([1], GREEDY, **options)


def test_a_cancelled_request_frees_its_blocks_at_once(tiny) -> None:
    engine = Engine(tiny(), rows=2, store=partial(Paged, block=4, blocks=12))
    requests = [engine.submit(ids, GREEDY) for ids in prompts(3, length=20)]
    engine.step()
    assert engine.metrics()["free_blocks"] == 2
    for request in requests:
        engine.cancel(request)
    assert engine.idle and engine.metrics()["free_blocks"] == 12
