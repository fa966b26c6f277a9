"""The request router of Ray Serve for replicas: the replica of a conversation first, then the least loaded other one.

Ray tries the ranks that `choose_replicas` returns in order, and skips replicas that have ended or that already have
`max_ongoing_requests`. The router runs in the process that has the handle, which is the one with the HTTP server.
"""

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from regard.server.conversations import preferred
from regard.server.forwarding import ForwardedRequest


class ConversationRouter(RequestRouter):
    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        request = pending_request.args[0] if pending_request is not None and pending_request.args else None
        if not isinstance(request, ForwardedRequest) or request.conversation is None or not candidate_replicas:
            return [candidate_replicas]
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        first = by_name[preferred(request.conversation, by_name)]
        return [[first], [replica for replica in candidate_replicas if replica is not first]]
