"""The queue of waiting requests: by priority, then fairly among tenants, then by arrival.

A lower priority value goes first, as in vLLM. Among equal ones a preempted request resumes first, then the tenant that
has been served the fewest tokens, so a tenant with a thousand requests does not delay another's only one. A tenant that
comes back starts with the smallest count of the others: it has saved nothing up. Sheng et al. 2023 (virtual token
counter).
"""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator

from regard.engine.request import Request


class WaitingQueue:
    def __init__(self) -> None:
        self.queues: dict[str, list[Request]] = {}  # by tenant, each in order of rank; none is empty
        self.served: dict[str, int] = {}  # tokens of every tenant that has requests here or running
        self.requests: Counter[str] = Counter()  # of these tenants

    def join(self, request: Request) -> None:
        """Add a new request. `leave` follows when it has finished."""
        others = self.served.values()
        self.served.setdefault(request.tenant, min(others, default=0))
        self.requests[request.tenant] += 1
        self.push(request)

    def leave(self, request: Request) -> None:
        self.requests[request.tenant] -= 1
        if not self.requests[request.tenant]:
            del self.requests[request.tenant], self.served[request.tenant]

    def charge(self, tenant: str, tokens: int) -> None:
        self.served[tenant] += tokens

    def push(self, request: Request) -> None:
        insort(self.queues.setdefault(request.tenant, []), request, key=rank)

    def remove(self, request: Request) -> None:
        self.queues[request.tenant].remove(request)
        if not self.queues[request.tenant]:
            del self.queues[request.tenant]

    def first(self, accept: Callable[[Request], bool] = lambda request: True) -> Request | None:
        """The request to admit next; None if there are none, or all wait for another request's prompt.

        accept: which requests are considered.
        """
        queues = self.queues.values()
        heads = (next((request for request in queue if not request.held and accept(request)), None) for queue in queues)
        return min((request for request in heads if request is not None), key=self.order, default=None)

    def order(self, request: Request) -> tuple:
        return request.priority, not request.preempted, self.served[request.tenant], request.arrival

    def __len__(self) -> int:
        return sum(map(len, self.queues.values()))

    def __iter__(self) -> Iterator[Request]:
        return (request for queue in self.queues.values() for request in queue)


def rank(request: Request) -> tuple:
    """The order of requests of one tenant."""
    return request.priority, not request.preempted, request.arrival
