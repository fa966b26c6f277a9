"""Prefetch: the next batches are made in a background thread while the model computes.

The thread reads the wrapped loader in its order and puts each batch in a bounded queue together with the loader's state
after that batch. The state of a `Prefetcher` is the one that belongs to the batch that was delivered last, not to the
one that was made last, so a run that resumes from it continues with the next batch, whatever was in the queue.

A thread is enough, because its work is done outside of Python's lock: tokenizing, copying arrays, pinning memory.
"""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any, Protocol

import torch

from regard.data.batch import Batch


class StatefulLoader(Protocol):
    """An endless iterable of batches, whose state can be written as JSON."""

    def __iter__(self) -> Iterator[Batch]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def prefetching(loader: StatefulLoader, depth: int, pin_memory: bool = False) -> AbstractContextManager[StatefulLoader]:
    """A context with a `Prefetcher` of the loader, or with the loader itself if `depth` is 0."""
    return Prefetcher(loader, depth, pin_memory) if depth else nullcontext(loader)


class Prefetcher:
    """A loader with the same batches and states as `loader`, of which up to `depth` batches are made in advance.

    pin_memory: copy batches to page-locked memory, from which a GPU copies asynchronously (`Batch.to` with
    `non_blocking=True`). An error of the loader is raised by the call that would deliver its batch. `close`, or leaving
    the `with` block, ends the thread; it also ends when the object is deleted, and with the process.
    """

    def __init__(self, loader: StatefulLoader, depth: int = 2, pin_memory: bool = False):
        if depth < 1:
            raise ValueError(f"depth={depth} must be at least 1; without prefetching, use the loader itself")
        self.loader, self.depth, self.pin_memory = loader, depth, pin_memory
        self._state = deepcopy(loader.state_dict())
        self._queue: _Queue | None = None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._queue is None:
            self._queue = _Queue(self.depth)
            device = torch.cuda.current_device() if self.pin_memory else None  # a new thread would use device 0
            arguments = (self.loader, self._queue, device)  # not self: the thread must not keep it alive
            self._thread = threading.Thread(target=_fill, args=arguments, name="prefetch", daemon=True)
            self._thread.start()
        item = self._queue.get()
        if isinstance(item, BaseException):
            raise item
        batch, self._state = item
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The state of the loader after the batch that was delivered last."""
        return deepcopy(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.close()
        self.loader.load_state_dict(state)
        self._state = deepcopy(self.loader.state_dict())

    def close(self) -> None:
        """End the thread. The loader is set back to the last delivered batch, so that iteration can go on."""
        if self._end_thread():
            self.loader.load_state_dict(deepcopy(self._state))

    def _end_thread(self) -> bool:
        """Returns whether there was one."""
        if self._queue is None:
            return False
        self._queue.close()
        self._thread.join()
        self._queue = None
        return True

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.close()
        else:  # setting back reads examples again: a second error would hide the first one
            self._end_thread()

    def __del__(self) -> None:
        queue = getattr(self, "_queue", None)
        if queue is not None:
            queue.close()


class _Queue:
    """A bounded queue of one producer and one consumer that either may close."""

    def __init__(self, depth: int):
        self.items: deque[Any] = deque()
        self.depth, self.closed, self.changed = depth, False, threading.Condition()

    def put(self, item: Any) -> bool:
        """Wait for a free place; False if the queue was closed."""
        with self.changed:
            self.changed.wait_for(lambda: self.closed or len(self.items) < self.depth)
            self.items.append(item)
            self.changed.notify_all()
            return not self.closed

    def get(self) -> Any:
        """Wait for an item. An exception is the last item and stays in the queue."""
        with self.changed:
            self.changed.wait_for(lambda: self.items)
            if isinstance(self.items[0], BaseException):
                return self.items[0]
            item = self.items.popleft()
            self.changed.notify_all()
            return item

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.items.clear()
            self.changed.notify_all()


def _fill(loader: StatefulLoader, queue: _Queue, device: int | None) -> None:
    """The thread: make batches until the loader ends, an error occurs or the queue is closed.

    device: of CUDA, for which memory is pinned; None: it is not pinned.
    """
    try:
        if device is not None:
            torch.cuda.set_device(device)
        for batch in loader:
            state = deepcopy(loader.state_dict())
            if device is not None:
                batch = Batch(**{name: tensor.pin_memory() for name, tensor in batch.items()})
            if not queue.put((batch, state)):
                return
        queue.put(StopIteration())
    except BaseException as error:  # the consumer raises it
        queue.put(error)
