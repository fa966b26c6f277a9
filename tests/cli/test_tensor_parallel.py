"""`--tensor-parallel 2` on CPUs: two processes with gloo, started and ended by the commands."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from regard.checkpoint import save
from regard.cli import is_expected
from regard.engine.ranks import RankError
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.position.rope import Rope
from regard.text.train import byte
from tests.server.conftest import wait_until
from tests.server.server_process import read_url

COMMAND = [sys.executable, "-m", "regard"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tensor-parallel") / "model"
    block = Block((Sublayer(Attention(4, kv_heads=2, position=Rope())), Sublayer(SwiGLU(48))))
    save(Decoder(vocab=256, width=32, layers=(Repeat((block,), 2),), context=512).build(seed=3), folder, byte())
    return folder


def test_a_rank_that_ended_is_reported_in_one_line() -> None:
    assert is_expected(RankError("rank 1 of the tensor parallel engine ended"))


def generate(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    arguments = ["generate", str(folder), "--prompt", "Anna", "--max-new", "8", "--temperature", "0", "--json"]
    return subprocess.run([*COMMAND, *arguments, *options], capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_generate_prints_the_tokens_of_one_process(folder: Path) -> None:
    found, expected = generate(folder, "--tensor-parallel", "2"), generate(folder)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["ids"] == json.loads(expected.stdout)["ids"]
    refused = generate(folder, "--tensor-parallel", "3")
    assert refused.returncode == 1 and "kv_heads=2 is not divisible by tensor=3" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


def complete(address: str) -> dict:
    body = json.dumps({"model": "model", "prompt": "Anna", "max_tokens": 4, "temperature": 0}).encode()
    request = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def children(pid: int) -> list[int]:
    """The ranks that a process has started, not the process that tracks its resources."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(each) for each in found if b"spawn_main" in Path(f"/proc/{each}/cmdline").read_bytes()]


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["signal", "dead rank"])
def test_serve_answers_and_ends_with_its_ranks(folder: Path, ending: str, tmp_path: Path) -> None:
    command = [*COMMAND, "serve", str(folder), "--tensor-parallel", "2", "--port", "0", "--rows", "2"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert server.stderr is not None
        url, _ = read_url(server)
        assert complete(url)["usage"]["completion_tokens"] == 4
        (rank,) = children(server.pid)
        os.kill(server.pid if ending == "signal" else rank, signal.SIGTERM if ending == "signal" else signal.SIGKILL)
        printed = server.stderr.read()
        status = server.wait(timeout=120)
    finally:
        server.kill()
        server.communicate()
    if ending == "signal":
        assert status == 128 + signal.SIGTERM and not printed
    else:
        assert status == 1 and "rank 1 of the tensor parallel engine ended (exit code -9); the server ends" in printed
    wait_until(lambda: not Path(f"/proc/{rank}").exists())  # its new parent collects it
    assert not list(tmp_path.glob("regard-ranks-*"))
