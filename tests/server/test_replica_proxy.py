"""Forwarding to replicas, without Ray: the replicas are applications in the same process."""

import asyncio
import json
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from types import SimpleNamespace

import httpx
import pytest

from regard.server import replicas
from regard.server.app import create_app
from regard.server.conversations import conversation_of, preferred
from regard.server.errors import ApiError
from regard.server.forwarding import ForwardedRequest, respond
from regard.server.metrics import merge_metrics
from regard.server.network_options import NetworkOptions
from regard.server.replica_proxy import ReplicaEnded, ReplicaProxy, ReplicaStatus, create_proxy_app
from regard.server.served_model import ServedModel
from tests.server.conftest import REPLY, serve, wait_until
from tests.server.fake_engine import FakeEngine

BODY = {"model": "tiny", "prompt": "the red lamp", "max_tokens": 12}
ENDLESS = BODY | {"max_tokens": 4000, "stream": True}  # minutes
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"


class ProxyServer:
    """One application behind a proxy; `faults` are raised by the next forwards, after so many parts of the body."""

    def __init__(self, app, network: NetworkOptions):
        self.app, self.faults, self.requests = app, [], []
        self.ready = {"0": True, "1": True}  # the replicas that answer
        self.proxy = ReplicaProxy(self.forward, 2, self.statuses)
        self.proxy_app = create_proxy_app(self.proxy, network, app.state.max_body)

    async def __call__(self, scope, receive, send) -> None:
        await (self.app if scope["type"] == "lifespan" else self.proxy_app)(scope, receive, send)

    async def forward(self, request: ForwardedRequest) -> AsyncGenerator[list, None]:
        self.requests.append(request)
        after, error = self.faults.pop(0) if self.faults else (None, None)
        if after == 0:
            raise error
        bodies = 0
        async with aclosing(respond(self.app, request)) as lists:
            async for messages in lists:
                yield messages
                bodies += sum(message["type"] == "http.response.body" for message in messages)
                if after is not None and bodies >= after:
                    raise error

    async def statuses(self) -> list[ReplicaStatus]:
        text = await self.app.state.metrics()
        return [ReplicaStatus(name, ready, text) for name, ready in self.ready.items()]


@pytest.fixture
def start(tokenizer) -> Iterator[Callable]:
    @contextmanager
    def started(key: str | None = None, repeat: bool = False, max_body: int | None = None):
        fake = FakeEngine(tokenizer, REPLY, repeat)
        fake.step_seconds = 0.05 if repeat else 0.0
        network = NetworkOptions(keys=(key,) if key else (), max_body=max_body)
        server = ProxyServer(create_app([ServedModel("tiny", tokenizer, fake)], network), network)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        with (
            serve(server) as port,
            httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, headers=headers) as client,
        ):
            yield server, client

    return started


def test_forwarded_responses_equal_those_of_the_application(start: Callable, start_server: Callable) -> None:
    direct = start_server().client
    with start() as (_, client):
        for path, body in [
            ("/v1/completions", BODY),
            ("/v1/completions", BODY | {"stream": True}),
            ("/v1/completions", BODY | {"temperature": -1}),
            ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "Where?"}]}),
            ("/v1/nothing", {}),
        ]:
            ours, theirs = client.post(path, json=body), direct.post(path, json=body)
            assert ours.status_code == theirs.status_code
            assert set(ours.headers) == set(theirs.headers)
            assert comparable(ours.text) == comparable(theirs.text)


def comparable(text: str) -> list:
    parts = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    objects = [json.loads(part) for part in parts if part != "[DONE]"]
    return [{name: value for name, value in each.items() if name not in ("id", "created")} for each in objects]


def test_a_key_is_required_before_a_request_is_forwarded(start: Callable) -> None:
    with start(key="secret") as (server, client):
        assert client.post("/v1/completions", json=BODY).status_code == 200
        for path in ("/v1/models", "/metrics"):
            refused = client.get(path, headers={"authorization": "Bearer wrong"})
            assert refused.status_code == 401 and len(server.requests) == 1


def test_a_request_has_the_same_id_in_its_replica(start: Callable) -> None:
    with start() as (server, client):
        for given in ("mine-1", 'a "quote"', None):
            response = client.get("/v1/models", headers={"x-request-id": given} if given else {})
            id = response.headers["x-request-id"]
            assert id == given if given == "mine-1" else id.startswith("req_")
            forwarded = dict(server.requests[-1].scope["headers"])
            assert response.status_code == 200 and forwarded[b"x-request-id"] == id.encode()


def test_a_body_that_is_too_long_is_refused_before_all_of_it_is_read(start: Callable) -> None:
    with start(max_body=5000) as (server, client):
        refused = client.post("/v1/completions", json=BODY | {"prompt": "a" * 5000})
        assert refused.status_code == 413 and refused.json()["error"]["code"] == "body_too_large"
        assert refused.headers["x-request-id"]
        with connect(client) as connection:
            connection.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n1400\r\n" + b" " * 0x1400 + b"\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 413 ")  # although more chunks could follow
        assert not server.requests


def test_the_limit_of_a_body_is_that_of_the_replicas(start: Callable) -> None:
    with start() as (server, client), connect(client) as connection:  # their model reads neither images nor audio
        connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % ((1 << 20) + 1))
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")
        assert not server.requests


def connect(client: httpx.Client) -> socket.socket:
    return socket.create_connection((client.base_url.host, client.base_url.port), timeout=60)


def test_a_request_is_sent_to_another_replica_if_nothing_of_its_response_was_sent(start: Callable) -> None:
    with start() as (server, client):
        server.faults = [(0, ReplicaEnded("killed")), (0, ReplicaEnded("killed"))]
        response = client.post("/v1/completions", json=BODY)
        assert response.status_code == 200 and len(server.requests) == 3
        server.faults = [(0, ReplicaEnded("killed"))] * 9
        failed = client.post("/v1/completions", json=BODY)
        assert failed.status_code == 503 and failed.json()["error"]["code"] == "replica_ended"
        assert failed.headers["retry-after"] == "1"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
def test_a_stream_whose_replica_ended_ends_with_an_error_event(start: Callable, path: str) -> None:
    responses = {"model": "tiny", "input": "the red lamp", "max_output_tokens": 4000, "stream": True}
    with start(repeat=True) as (server, client):
        server.faults = [(2, ReplicaEnded("killed"))]
        response = client.post(path, json=ENDLESS if path == "/v1/completions" else responses)
        events = [part for part in response.text.split("\n\n") if part and part != "data: [DONE]"]
        assert response.status_code == 200 and len(events) >= 2 and len(server.requests) == 1
        assert "replica_ended" in events[-1] and not any("replica_ended" in event for event in events[:-1])
        if path == "/v1/responses":
            assert events[-1].startswith("event: error\ndata: ")
        else:
            assert response.text.endswith("data: [DONE]\n\n")


def test_a_refusal_of_ray_is_the_response(start: Callable) -> None:
    with start() as (server, client):
        server.faults = [(0, ApiError(429, "full", code="queue_full", headers={"retry-after": "1"}))]
        response = client.post("/v1/completions", json=BODY)
        assert response.status_code == 429 and response.headers["retry-after"] == "1"


def test_a_client_that_disconnects_cancels_its_generation(start: Callable) -> None:
    with start(repeat=True) as (server, client):
        engine = server.app.state.models.default.engine.engine
        with client.stream("POST", "/v1/completions", json=ENDLESS) as response:
            next(response.iter_lines())
        wait_until(lambda: engine.cancelled == 1 and not server.proxy.tasks)


def test_streams_end_with_an_error_event_when_the_server_stops(start: Callable) -> None:
    with start(repeat=True) as (server, client):
        with client.stream("POST", "/v1/completions", json=ENDLESS) as response:
            lines = response.iter_lines()
            next(lines)
            server.proxy.tasks.copy().pop().get_loop().call_soon_threadsafe(server.proxy.cancel_all, "shutting down")
            rest = list(lines)
        assert any("shutting_down" in line for line in rest) and "data: [DONE]" in rest


def test_metrics_of_replicas_are_labelled_and_grouped(start: Callable) -> None:
    with start() as (server, client):
        client.post("/v1/completions", json=BODY)
        lines = client.get("/metrics").text.splitlines()
    assert 'regard_http_responses_total{replica="1",route="/v1/completions",status="200"} 1' in lines
    help = [line for line in lines if line.startswith("# HELP regard_http_responses_total")]
    steps = [line for line in lines if line.startswith("regard_engine_running{")]
    assert len(help) == 1 and [line.split()[0] for line in steps] == [
        'regard_engine_running{replica="0",model="tiny"}',
        'regard_engine_running{replica="1",model="tiny"}',
    ]
    text = '# HELP a A.\n# TYPE a counter\na 1\na_bucket{le="1"} 2\n'
    assert merge_metrics({"0": text, "1": text}) == (
        "# HELP regard_replica_up 1 if the replica answers and its engines run, 0 if not.\n"
        '# TYPE regard_replica_up gauge\nregard_replica_up{replica="0"} 1\nregard_replica_up{replica="1"} 1\n'
        '# HELP a A.\n# TYPE a counter\na{replica="0"} 1\na_bucket{replica="0",le="1"} 2\n'
        'a{replica="1"} 1\na_bucket{replica="1",le="1"} 2\n'
    )


def test_the_proxy_answers_probes_itself(start: Callable) -> None:
    with start(key="secret") as (server, client):
        del client.headers["authorization"]
        for replicas, status in [({"1": True}, 200), ({"0": False}, 503), ({}, 503)]:
            server.ready = replicas
            ready = client.get("/ready")
            assert ready.status_code == status and client.get("/health").json() == {"status": "ok"}
        assert ready.json()["error"]["code"] == "not_ready"
        server.ready = {"1": True}
        lines = client.get("/metrics", headers={"authorization": "Bearer secret"}).text.splitlines()
        assert {'regard_replica_up{replica="0"} 0', 'regard_replica_up{replica="1"} 1'} <= set(lines)
        assert 'regard_engine_up{replica="1",model="tiny"} 1' in lines
        assert not any('replica="0",model' in line for line in lines)
        server.proxy.draining = True
        assert client.get("/ready").status_code == 503 and client.get("/health").status_code == 200
        assert not server.requests, "nothing was forwarded"


def test_probes_at_the_same_time_share_one_question() -> None:
    async def main() -> int:
        asked = 0

        async def statuses() -> list[ReplicaStatus]:
            nonlocal asked
            asked += 1
            await asyncio.sleep(0.01)
            return []

        proxy = ReplicaProxy(None, 2, statuses)
        await asyncio.gather(*(proxy.statuses() for _ in range(50)))
        return asked

    assert asyncio.run(main()) == 1


def test_the_requests_of_a_conversation_have_the_same_replica() -> None:
    first = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is Anna?"}]
    later = [*first, {"role": "assistant", "content": "In the barn."}, {"role": "user", "content": "And Tom?"}]
    bodies = [{"model": "m", "messages": first}, {"model": "m", "messages": later, "stream": True}]
    assert len({conversation_of(json.dumps(body).encode()) for body in bodies}) == 1
    others = [
        {"model": "m", "messages": [first[0], {"role": "user", "content": "Who?"}]},
        {"model": "other", "messages": first},
        {"model": "m", "messages": first, "prompt_cache_key": "anna"},
        {"model": "m", "prompt": "a" * 300},
        {"model": "m", "input": first},
        {"model": "m", "input": first, "instructions": "Be long."},
    ]
    keys = [conversation_of(json.dumps(body).encode()) for body in (*bodies[:1], *others)]
    assert len(set(keys)) == len(keys) - 1 or len(set(keys)) == len(keys)
    grown = conversation_of(json.dumps({"model": "m", "prompt": "a" * 300 + "b"}).encode())
    assert grown == keys[4] and None not in keys
    for body in (b"", b"[1]", b"{", b'{"input": 3}', b"[" * 100_000, b'{"messages": []}', b"\xff"):
        assert conversation_of(body) is None
    for depth in range(300, 2000):  # some can be parsed, but not written again
        conversation_of(b'{"prompt_cache_key": %s1%s}' % (b"[" * depth, b"]" * depth))
    images = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:" + "a" * 300_000}}]}]
    long = [conversation_of(json.dumps({"model": "m", "messages": images * turns}).encode()) for turns in (1, 2)]
    assert long[0] == long[1] is not None


def test_only_the_conversations_of_a_replica_that_ended_move() -> None:
    replicas, conversations = ["a", "b", "c"], [str(i) for i in range(300)]
    before = {key: preferred(key, replicas) for key in conversations}
    after = {key: preferred(key, ["a", "c"]) for key in conversations}
    assert all(after[key] == before[key] for key in conversations if before[key] != "b")
    counts = [sum(replica == name for replica in before.values()) for name in replicas]
    assert min(counts) > 60, counts


def pretend_ray(monkeypatch: pytest.MonkeyPatch, **functions: Callable) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(**functions))
    monkeypatch.setitem(sys.modules, "ray.exceptions", SimpleNamespace(RayError=RuntimeError))


def test_a_replica_that_does_not_answer_in_time_has_no_status(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(name: str) -> dict:
        if name == "b":
            await asyncio.sleep(60)
        if name == "c":
            raise RuntimeError("the actor is starting")
        return {"name": name, "ready": True, "metrics": ""}

    def get_actor(name: str, namespace: str) -> SimpleNamespace:
        if "d" in name:
            raise ValueError("it has ended")
        return SimpleNamespace(record_routing_stats=SimpleNamespace(remote=lambda: answer(name[-1])))

    names = ["REPLICA::mine#a", "REPLICA::mine#b", "REPLICA::mine#c", "REPLICA::mine#d", "REPLICA::other#e"]
    actors = [{"name": name, "namespace": "serve"} for name in names]
    util = SimpleNamespace(list_named_actors=lambda all_namespaces: actors)
    pretend_ray(monkeypatch, get_actor=get_actor, util=util)
    monkeypatch.setattr(replicas, "STATUS_TIMEOUT", 0.2)
    assert [status.name for status in asyncio.run(replicas.replica_statuses("mine"))] == ["a"]


def test_replicas_without_free_resources_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "RESOURCE_TIMEOUT", 0)
    free = {"CPU": 8.0, "GPU": 1.0}
    pretend_ray(monkeypatch, available_resources=lambda: free, cluster_resources=lambda: {"CPU": 8.0, "GPU": 4.0})
    for count, gpus in [(1, 1), (8, 0)]:
        replicas.require_resources(replicas.ReplicaOptions(count, requests=1, queue=1, gpus=gpus))
    for count, gpus, message in [
        (2, 1, "need 2 free GPUs, and Ray has 1 of 4; .*--device cpu"),
        (9, 0, "need 9 free CPUs"),
    ]:
        with pytest.raises(ValueError, match=message):
            replicas.require_resources(replicas.ReplicaOptions(count, requests=1, queue=1, gpus=gpus))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's import
def test_a_conversation_goes_to_its_replica_and_then_to_the_others() -> None:
    pytest.importorskip("ray")
    from regard.server.replica_router import ConversationRouter

    replicas = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in "abc"]

    def ranks(request: object) -> list[list[str]]:
        pending = SimpleNamespace(args=[request])
        chosen = asyncio.run(ConversationRouter.choose_replicas(None, replicas, pending))
        return [[replica.replica_id.unique_id for replica in rank] for rank in chosen]

    for conversation in ("x", "y", "z"):
        first = preferred(conversation, "abc")
        others = [name for name in "abc" if name != first]
        assert ranks(ForwardedRequest({}, b"", conversation)) == [[first], others]
    assert ranks(ForwardedRequest({}, b"")) == [["a", "b", "c"]]
    assert ranks(None) == [["a", "b", "c"]]
