"""Models and routers stop their threads while the event loop runs on, and nothing is lost or fails with a 500."""

import asyncio
import threading
from typing import Any

import httpx
import pytest

from regard.server.app import create_app
from regard.server.errors import ApiError
from regard.server.lens_thread import LensThread
from regard.server.model_registry import ModelRegistry
from regard.server.served_model import ServedModel, TextEncoder
from regard.server.worker_thread import WorkerThread
from regard.text.train import byte
from tests.server.fake_engine import fake_embeddings, fake_lens, fake_scores


def encoder(name: str) -> ServedModel:
    return ServedModel(name, byte(), encoder=TextEncoder(fake_embeddings))


def test_a_job_that_runs_on_does_not_block_the_event_loop_while_its_model_stops() -> None:
    model, started, release = encoder("a"), threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        release.wait(60)

    async def main() -> None:
        job = asyncio.ensure_future(model.lens_thread.run(work))
        await asyncio.sleep(0)  # submits it
        assert await asyncio.to_thread(started.wait, 60)
        job.cancel()  # its client has left
        assert model.busy
        stop = asyncio.ensure_future(model.stop())
        await asyncio.sleep(0.02)
        assert not stop.done()
        release.set()
        await stop

    asyncio.run(main())


@pytest.mark.parametrize("thread", ["tokenizer_thread", "lens_thread"])
def test_a_removed_model_finishes_the_work_beside_the_engine_and_then_refuses(thread: str) -> None:
    model, release = encoder("a"), threading.Event()
    registry = ModelRegistry([model, encoder("b")])

    async def main() -> None:
        job = asyncio.ensure_future(getattr(model, thread).run(release.wait, 60))
        removal = asyncio.ensure_future(registry.remove("a"))
        await asyncio.sleep(0.1)
        assert not removal.done() and registry.names == ["b"]
        assert await model.encode_with_special_tokens("x") if thread == "lens_thread" else True
        release.set()
        await asyncio.gather(job, removal)
        with pytest.raises(ApiError, match="was removed") as refusal:
            await model.encode_with_special_tokens("x")
        assert refusal.value.status == 503

    asyncio.run(main())


def test_scores_are_computed_again_after_a_failure_and_count_as_a_request() -> None:
    thread, requests, failures = WorkerThread("lens"), [], [RuntimeError("out of memory")]

    def score():
        requests.append(thread.requests)
        if failures:
            raise failures.pop()
        return fake_scores()

    lens = LensThread(fake_lens()._replace(score=score), thread)

    async def main() -> None:
        with pytest.raises(RuntimeError, match="out of memory"):
            await lens.scores()
        assert await lens.scores() is await lens.scores()

    asyncio.run(main())
    assert requests == [1, 1]


def test_the_threads_of_the_routers_stop_with_the_server_and_nothing_is_loaded_meanwhile(monkeypatch) -> None:
    stopped, found = [], []
    stop = WorkerThread.stop
    monkeypatch.setattr(WorkerThread, "stop", lambda self: stopped.append(self.name) or stop(self))

    class Library:
        def find(self, model: str) -> None:
            found.append(model)

    library: Any = Library()
    app = create_app([encoder("a")], library=library, runs=library)

    async def main() -> httpx.Response:
        async with app.router.lifespan_context(app):
            app.state.models.draining = True
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                return await client.post("/regard/models/load", json={"model": "b"})

    response = asyncio.run(main())
    assert response.status_code == 503 and response.json()["error"]["code"] == "shutting_down" and found == ["b"]
    assert {"models", "loading", "verify", "runs", "instruments", "lens"} <= set(stopped)
