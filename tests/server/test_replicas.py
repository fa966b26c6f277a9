"""`regard serve --replicas 2` on Ray, with real processes, one of which is killed under load."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from regard.checkpoint import save
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.position.rope import Rope
from regard.text.train import byte
from tests.server.server_process import read_url

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STORY = "Mira put the red lamp into the wooden box and carried it to the garden. "


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, subprocess.Popen]]:
    pytest.importorskip("ray.serve")
    folder = tmp_path_factory.mktemp("replicas") / "tiny"
    block = Block((Sublayer(Attention(heads=4, kv_heads=2, position=Rope())), Sublayer(SwiGLU(48))))
    tokenizer = byte()
    save(Decoder(vocab=261, width=32, layers=(Repeat((block,), 2),), context=1024).build(seed=3), folder, tokenizer)
    command = [sys.executable, "-m", "regard", "serve", str(folder), "--replicas", "2", "--port", "0", "--rows", "8"]
    environment = os.environ | {"REGARD_KEY": "secret", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        url, _ = read_url(process)
        threading.Thread(target=process.stderr.read, daemon=True).start()  # so that the pipe never fills
        children = descendants(process.pid)
        yield url, process
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=90) in (0, signal.SIGTERM, -signal.SIGTERM)  # Ray exits with the number itself
    deadline = time.monotonic() + 30
    while left := [child for child in children if alive(child)]:
        assert time.monotonic() < deadline, f"orphans: {left}"
        time.sleep(0.2)


@pytest.fixture
def client(server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server[0], headers={"authorization": "Bearer secret"}, timeout=120) as client:
        yield client


def descendants(pid: int) -> dict[int, str]:
    """The processes below this one, with their command lines."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
    found: dict[int, str] = {}
    level = {pid}
    while level := {child for child, parent in parents.items() if parent in level}:
        found |= {child: command_line(child) for child in level}
    return found


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return ""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def replicas(server) -> list[int]:
    return [pid for pid, command in descendants(server[1].pid).items() if "ServeReplica" in command]


def counts(client: httpx.Client, metric: str) -> dict[str, float]:
    """A metric by replica."""
    lines = client.get("/metrics").text.splitlines()
    samples = (re.fullmatch(rf'{metric}\{{replica="(\d+)",model="tiny"\}} (\S+)', line) for line in lines)
    return {match[1]: float(match[2]) for match in samples if match}


def ask(client: httpx.Client, messages: list[dict], **options: object) -> str:
    body = {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0, **options}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def test_a_conversation_stays_on_the_replica_that_has_its_prefix(server, client: httpx.Client) -> None:
    assert client.get("/v1/models", headers={"authorization": "wrong"}).status_code == 401
    conversations = [[{"role": "user", "content": f"{STORY} {i}"}] for i in range(6)]
    hits = "regard_engine_prefix_hit_tokens_total"
    before = counts(client, hits)
    assert len(before) == 2
    for messages in conversations * 3:
        messages += [{"role": "assistant", "content": ask(client, messages)}, {"role": "user", "content": "And then?"}]
    after = counts(client, hits)
    turns = len(conversations) * 2  # that have an earlier one
    assert sum(after.values()) - sum(before.values()) >= turns * len(STORY) // 16 * 16
    used = counts(client, "regard_engine_prompt_tokens_total")
    assert all(used.values()), "both replicas have conversations"


def test_the_limit_of_a_body_is_that_of_the_replicas(server, client: httpx.Client) -> None:
    with socket.create_connection(("127.0.0.1", client.base_url.port), timeout=20) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer secret\r\n"
        connection.sendall(head + b"content-length: %d\r\n\r\n" % ((1 << 20) + 1))
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")  # the proxy does not wait for the body


def test_a_replica_that_hangs_does_not_hang_probes(server, client: httpx.Client) -> None:
    def up() -> list[str]:
        response = client.get("/metrics", headers={"x-request-id": "mine"})
        assert response.status_code == 200 and response.headers["x-request-id"] == "mine"
        return sorted(re.findall(r'^regard_replica_up\{replica="\d"\} (\d)$', response.text, re.MULTILINE))

    wait_for(lambda: up() == ["1", "1"])
    stopped = replicas(server)[0]
    os.kill(stopped, signal.SIGSTOP)
    try:
        start = time.monotonic()
        assert up() == ["0", "1"] and httpx.get(f"{server[0]}/ready", timeout=30).status_code == 200
        assert httpx.get(f"{server[0]}/health", timeout=30).json() == {"status": "ok"}
        assert time.monotonic() - start < 20  # Ray replaces a replica that does not answer for 30 seconds
    finally:
        os.kill(stopped, signal.SIGCONT)
    wait_for(lambda: up() == ["1", "1"])


def test_a_replica_that_is_killed_under_load_is_replaced(server, client: httpx.Client) -> None:
    outcomes: list[str] = []
    stop = threading.Event()

    def load(index: int) -> None:
        with httpx.Client(base_url=server[0], headers=client.headers, timeout=120) as own:
            turn = 0
            while not stop.is_set():
                turn += 1
                body = {
                    "model": "tiny",
                    "prompt": f"{index} {turn} {STORY}",
                    "max_tokens": 60,
                    "stream": bool(turn % 2),
                }
                response = own.post("/v1/completions", json=body)
                complete = response.text.endswith("data: [DONE]\n\n") if turn % 2 else response.status_code == 200
                failed = "replica_ended" in response.text
                outcomes.append("failed" if failed else "ok" if complete else response.text)

    threads = [threading.Thread(target=load, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    try:
        wait_for(lambda: len(outcomes) > 12)
        first = set(replicas(server))
        assert len(first) == 2
        os.kill(min(first), signal.SIGKILL)
        seen = len(outcomes)
        wait_for(lambda: len(outcomes) > seen + 30)
    finally:
        stop.set()
        for thread in threads:
            thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads), "a request hangs"
    assert set(outcomes) <= {"ok", "failed"} and outcomes.count("failed") <= len(threads)
    for i in range(8):  # every later request succeeds
        assert client.post("/v1/completions", json={"model": "tiny", "prompt": str(i), "max_tokens": 3}).is_success
    wait_for(lambda: len(set(replicas(server))) == 2 and min(first) not in replicas(server))
    wait_for(lambda: len(counts(client, "regard_engine_rows")) == 2)


def wait_for(condition, seconds: float = 150) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"timed out after {seconds} seconds"
        time.sleep(0.1)
