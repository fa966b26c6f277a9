"""A prefetching loader delivers the batches and states of the plain one; errors and the end reach the consumer."""

import gc
import json
import threading

import pytest
import torch

from regard.data.batch import Batch
from regard.data.prefetch import Prefetcher


class CountingLoader:
    """Batches 0, 1, 2 …; its state has a list that changes in place."""

    def __init__(self, end: int | None = None, error: Exception | None = None):
        self.end, self.error, self.next, self.history = end, error, 0, []

    def __iter__(self):
        return self

    def __next__(self) -> Batch:
        if self.next == self.end:
            raise self.error or StopIteration
        self.next += 1
        self.history.append(self.next)
        return Batch(tokens=torch.full((2, 3), self.next - 1))

    def state_dict(self):
        return {"next": self.next, "history": self.history}

    def load_state_dict(self, state):
        self.next, self.history = state["next"], list(state["history"])


def number(batch: Batch) -> int:
    return int(batch.tokens[0, 0])


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_batches_and_states_equal_those_of_the_plain_loader(depth):
    plain = CountingLoader()
    with Prefetcher(CountingLoader(), depth) as loader:
        assert loader.state_dict() == plain.state_dict()
        for _ in range(20):
            assert torch.equal(next(loader).tokens, next(plain).tokens)
            assert json.loads(json.dumps(loader.state_dict())) == plain.state_dict()


@pytest.mark.parametrize("stop", [0, 1, 5])
def test_a_resumed_loader_continues_after_the_delivered_batch(stop):
    first = Prefetcher(CountingLoader(), depth=4)
    for _ in range(stop):
        next(first)
    state = first.state_dict()
    next(first)
    assert first.state_dict() != state  # a saved state does not change later
    first.close()
    with Prefetcher(CountingLoader(), depth=4) as second:
        second.load_state_dict(state)
        assert second.state_dict() == state
        assert [number(next(second)) for _ in range(3)] == [stop, stop + 1, stop + 2]
        second.load_state_dict(state)  # also while the queue is full
        assert number(next(second)) == stop


def test_a_closed_loader_is_at_the_delivered_batch_and_can_go_on():
    plain = CountingLoader()
    loader = Prefetcher(plain, depth=5)
    assert [number(next(loader)) for _ in range(3)] == [0, 1, 2]
    loader.close()
    assert plain.state_dict() == loader.state_dict() == {"next": 3, "history": [1, 2, 3]}
    assert number(next(loader)) == 3
    loader.close()
    loader.close()


def test_at_most_depth_batches_are_made_in_advance():
    class Waiting(CountingLoader):
        def __next__(self):
            batch = super().__next__()
            made.release()
            return batch

    made = threading.Semaphore(0)
    plain = Waiting()
    with Prefetcher(plain, depth=3) as loader:
        next(loader)
        for _ in range(5):  # the delivered one, three in the queue, one that waits for a free place
            assert made.acquire(timeout=60)
        assert not made.acquire(timeout=0.2) and plain.next == 5


def test_errors_and_the_end_come_after_the_batches_before_them():
    with Prefetcher(CountingLoader(3), depth=5) as loader:
        assert [number(batch) for batch in loader] == [0, 1, 2]
        assert list(loader) == []
    with Prefetcher(CountingLoader(2, ValueError("line 7 is damaged")), depth=5) as loader:
        assert [number(next(loader)) for _ in range(2)] == [0, 1]
        for _ in range(2):
            with pytest.raises(ValueError, match="line 7 is damaged"):
                next(loader)
        assert loader.state_dict()["next"] == 2
    with pytest.raises(ValueError, match="depth=0 must be at least 1"):
        Prefetcher(CountingLoader(), depth=0)


@pytest.mark.parametrize("delete", [False, True])
def test_no_thread_is_left(delete):
    loader = Prefetcher(CountingLoader(), depth=2)
    next(loader)
    thread = loader._thread
    if delete:
        del loader
        gc.collect()
    else:
        loader.close()
    thread.join(timeout=60)
    assert not thread.is_alive()


@pytest.mark.gpu
def test_pinned_batches():
    with Prefetcher(CountingLoader(), pin_memory=True) as loader:
        batch = next(loader)
        assert batch.tokens.is_pinned()
        assert number(batch.to("cuda", non_blocking=True)) == 0
