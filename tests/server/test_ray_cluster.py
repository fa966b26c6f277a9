"""Two servers with `--replicas` on one Ray cluster, which each start and end replicas of their own."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.server_process import save_tiny, serve_process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With two CPUs; its address is in the environment of the test."""
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.serve")
    from regard.server.replicas import start_ray

    monkeypatch.setitem(sys.modules, "ray.dashboard.optional_deps", None)  # start_ray sets it
    start_ray(ray, cpus=2)
    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    yield
    ray.shutdown()


def completes(url: str) -> bool:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 3}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=120).is_success


def test_servers_share_a_cluster(cluster: None, tmp_path: Path) -> None:
    from ray import serve

    folder = save_tiny(tmp_path / "tiny")
    with (
        serve_process(folder, "--replicas", "1") as (first, url),
        serve_process(folder, "--replicas", "1") as (_, other),
    ):
        assert completes(url) and completes(other) and httpx.get(f"{url}/ready", timeout=60).is_success
        names = set(serve.status().applications)
        assert len(names) == 2
        with (
            pytest.raises(AssertionError, match="did not start"),  # both CPUs are in use
            serve_process(folder, "--replicas", "1"),
        ):
            pass
        first.send_signal(signal.SIGTERM)
        first.wait(timeout=120)
        assert completes(other) and len(set(serve.status().applications) & names) == 1
