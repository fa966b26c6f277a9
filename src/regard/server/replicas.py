"""Replicas of a server, on Ray Serve: each is a process with the whole application, its own engine and weights.

    client ── HTTP server, ReplicaProxy ── handle of Ray Serve, ConversationRouter ──▶ replica 0 … N-1

The process with the HTTP server loads no model. Ray starts the replicas, on this machine or, if RAY_ADDRESS is set, on
a cluster, checks them, and starts a new one if one ends.
"""

import asyncio
import logging
import os
import secrets
import sys
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.types import Message

from regard.server.errors import ApiError
from regard.server.forwarding import ForwardedRequest, respond
from regard.server.network_options import NetworkOptions
from regard.server.replica_proxy import ReplicaEnded, ReplicaProxy, ReplicaStatus, create_proxy_app
from regard.server.run_server import run

log = logging.getLogger(__name__)
OBJECT_STORE = 80 << 20  # bytes, the least that Ray accepts: responses are small and are not kept in it
START_ATTEMPTS = 4
HEALTH_PERIOD, HEALTH_TIMEOUT = 5, 30  # seconds
STATUS_TIMEOUT = 2.0
RESOURCE_TIMEOUT = 10.0  # other replicas may be about to end
NEVER = 1e9  # seconds


@dataclass(frozen=True)
class ReplicaOptions:
    """requests: how many a replica takes at a time; further ones go to other replicas. queue: requests that may wait
    for a replica. gpus: per replica."""

    replicas: int
    requests: int
    queue: int
    gpus: int = 0


def serve_replicas(
    open_app: Callable[[], FastAPI],
    network: NetworkOptions,
    options: ReplicaOptions,
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve until a signal arrives, on the Ray of `started_ray`. `open_app` returns the application of a replica; it is
    called in its process."""
    from ray import serve

    require_resources(options)
    serve.start(proxy_location="Disabled")  # the HTTP server is this process
    application = f"regard-{secrets.token_hex(4)}"  # its own on a cluster with several servers
    try:
        handle = deploy(open_app, options, network.drain, application)
        proxy = ReplicaProxy(forward_by(handle), options.replicas, partial(replica_statuses, application))
        max_body = handle.max_body.remote().result()  # it depends on the models, which only the replicas load
        run(create_proxy_app(proxy, network, max_body), network, on_ready)
    finally:
        serve.delete(application)


class Replica:
    """Deployed by Ray Serve, which calls __init__ and all methods in one event loop."""

    async def __init__(self, open_app: Callable[[], FastAPI], replicas: int) -> None:
        import torch
        from ray import serve

        if not torch.cuda.is_available():  # Ray sets one thread; all replicas together use all cores
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // replicas))
        self.name = str(serve.get_replica_context().rank.rank)
        self.app = open_app()
        self.exits = AsyncExitStack()
        await self.exits.enter_async_context(self.app.router.lifespan_context(self.app))

    def max_body(self) -> int:
        return self.app.state.max_body

    async def respond(self, request: ForwardedRequest) -> AsyncGenerator[list[Message], None]:
        async with aclosing(respond(self.app, request)) as lists:
            async for messages in lists:
                yield messages

    async def record_routing_stats(self) -> dict[str, Any]:
        """The fields of its ReplicaStatus."""
        ready, metrics = not self.app.state.models.stopped, await self.app.state.metrics()
        return {"name": self.name, "ready": ready, "metrics": metrics}

    def check_health(self) -> None:
        if stopped := self.app.state.models.stopped:
            raise RuntimeError(f"the engine of {', '.join(stopped)} has stopped")  # Ray replaces the replica


@contextmanager
def started_ray(cpus: int) -> Generator[bool]:
    """Start Ray on this machine for so many processes, or connect to RAY_ADDRESS; yields whether it has GPUs."""
    try:
        import ray
        from ray import serve
    except ModuleNotFoundError:
        raise ValueError("replicas need Ray: pip install 'regard[ray]'") from None
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    own = not os.environ.get("RAY_ADDRESS")
    start_ray(ray, cpus if own else None)
    try:
        yield "GPU" in ray.cluster_resources()
    finally:
        if own:
            serve.shutdown()
        ray.shutdown()


def require_resources(options: ReplicaOptions) -> None:
    """Raise ValueError if Ray has no room for the replicas: it would wait for it without end."""
    import ray

    needed = {"CPU": options.replicas, "GPU": options.replicas * options.gpus}
    deadline = time.monotonic() + RESOURCE_TIMEOUT
    while missing := [name for name in needed if ray.available_resources().get(name, 0) < needed[name]]:
        if time.monotonic() > deadline:
            name = missing[0]
            free, total = (found.get(name, 0) for found in (ray.available_resources(), ray.cluster_resources()))
            raise ValueError(
                f"the replicas need {needed[name]} free {name}s, and Ray has {free:g} of {total:g}; start fewer, end "
                f"other jobs{', serve on CPUs with --device cpu,' if name == 'GPU' else ''} or add machines"
            )
        time.sleep(0.2)


def start_ray(ray: Any, cpus: int | None) -> None:
    """Start Ray on this machine for so many processes; None: connect to RAY_ADDRESS.

    Ray 2.60 ends if its agent needs more than 15 seconds to start, as on a busy machine (ray-project/ray#65983). The
    agent serves the dashboard and Ray's own metrics; without the packages of the dashboard Ray starts a small one.
    """
    quiet = {"log_to_driver": False, "logging_level": logging.WARNING, "configure_logging": False}
    if cpus is None:
        return ray.init(**quiet)
    os.environ.setdefault("RAY_worker_niceness", "0")  # by default 15: on a busy machine replicas would hardly run
    modules: dict[str, Any] = sys.modules
    modules["ray.dashboard.optional_deps"] = None  # as if they were not installed
    for attempt in range(START_ATTEMPTS):
        try:
            return ray.init(num_cpus=cpus, object_store_memory=OBJECT_STORE, include_dashboard=False, **quiet)
        except Exception as error:  # Ray raises nothing more specific
            if "timed out during startup" not in str(error) or attempt == START_ATTEMPTS - 1:
                raise RuntimeError(f"Ray did not start ({error}); its logs are in /tmp/ray/session_latest") from error
            log.warning("Ray did not start in time; trying again")


def deploy(open_app: Callable[[], FastAPI], options: ReplicaOptions, drain: float, application: str) -> Any:
    """Start the replicas, and return their handle."""
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    router = RequestRouterConfig(
        request_router_class="regard.server.replica_router.ConversationRouter",
        request_routing_stats_period_s=NEVER,  # replica_statuses asks for them
    )
    deployment = serve.deployment(
        name="regard",
        num_replicas=options.replicas,
        max_ongoing_requests=options.requests,
        max_queued_requests=options.queue,
        ray_actor_options={"num_cpus": 1, "num_gpus": options.gpus},
        request_router_config=router,
        health_check_period_s=HEALTH_PERIOD,
        health_check_timeout_s=HEALTH_TIMEOUT,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=drain,
        logging_config={"log_level": "WARNING", "enable_access_log": False},
    )(Replica)
    return serve.run(deployment.bind(open_app, options.replicas), name=application, route_prefix=None)


def forward_by(handle: Any) -> Callable[[ForwardedRequest], AsyncGenerator[list[Message], None]]:
    from ray.exceptions import RayActorError, RayTaskError
    from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError

    method = handle.options(method_name="respond", stream=True)

    async def forward(request: ForwardedRequest) -> AsyncGenerator[list[Message], None]:
        stream = method.remote(request)
        try:
            async for messages in stream:
                yield messages
        except BackPressureError:
            message = "too many requests are waiting already; try again later"
            raise ApiError(429, message, code="queue_full", headers={"retry-after": "1"}) from None
        except (RayActorError, ReplicaUnavailableError, DeploymentUnavailableError) as error:
            raise ReplicaEnded(str(error).partition("\n")[0]) from error
        except RayTaskError as error:
            log.error("a replica failed on a request: %s", error)
            message = "the server failed on this request; its log has the details"
            raise ApiError(500, message, code="internal") from error
        finally:
            stream.cancel()  # no effect if it has ended

    return forward


async def replica_statuses(application: str) -> list[ReplicaStatus]:
    """The statuses of the replicas that answer within STATUS_TIMEOUT.

    The question goes to their actors, whose names contain that of the application: a call of the handle would wait
    while a replica has `max_ongoing_requests`.
    """
    import ray
    from ray.exceptions import RayError

    async def ask(actor: dict[str, str]) -> ReplicaStatus | None:
        try:
            async with asyncio.timeout(STATUS_TIMEOUT):
                replica = await asyncio.to_thread(ray.get_actor, **actor)
                return ReplicaStatus(**await replica.record_routing_stats.remote())
        except (TimeoutError, ValueError, RayError):  # it hangs, has ended, or is starting
            return None

    try:
        async with asyncio.timeout(STATUS_TIMEOUT):
            actors = await asyncio.to_thread(ray.util.list_named_actors, all_namespaces=True)
    except (TimeoutError, RayError):
        return []
    found = await asyncio.gather(*(ask(actor) for actor in actors if application in actor["name"]))
    return [status for status in found if status is not None]
