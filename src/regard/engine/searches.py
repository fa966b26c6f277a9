"""Searches (beam, contrastive) that advance with the steps of an engine.

A search is a generator that yields after each of its forwards; a step of the engine runs it up to the next yield. So
other requests advance meanwhile, in the rows that the search has not taken. One search runs at a time, since two of
them could wait for the rows of each other.
"""

from collections.abc import Callable, Generator
from typing import Any

SearchSteps = Generator[None, None, Any]  # returns the result


class Search:
    def __init__(self, steps: SearchSteps):
        self.steps = steps
        self.done = False
        self.result: Any = None
        self.error: Exception | None = None

    def advance(self) -> None:
        try:
            next(self.steps)
        except StopIteration as end:
            self.done, self.result = True, end.value
        except Exception as error:  # raised again by `Searches.run`; the step goes on with the requests
            self.done, self.error = True, error


class Searches:
    def __init__(self) -> None:
        self.queue: list[Search] = []  # the first is running

    def advance(self) -> None:
        """Run the next forward of the first search."""
        self.queue[0].advance()
        if self.queue[0].done:
            del self.queue[0]

    def run(self, steps: SearchSteps, step: Callable[[], object]) -> Any:
        """The result of a search. step: of the engine, which calls `advance`."""
        search = Search(steps)
        self.queue.append(search)
        try:
            while not search.done:
                step()
        finally:
            steps.close()  # gives its rows back, also after an interruption
            if search in self.queue:
                self.queue.remove(search)
        if search.error is not None:
            raise search.error
        return search.result
