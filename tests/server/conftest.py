"""A real uvicorn server on a free port, so that streams and disconnects are not simulated."""

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from rich.console import Console

from regard.cli.demo_process import DemoProcesses
from regard.cli.model_library import ModelLibrary
from regard.cli.open_engine import EngineOptions
from regard.cli.served_runs import ServedRuns
from regard.language_model import LanguageModel
from regard.load_model import load
from regard.server.app import create_app
from regard.server.network_options import NetworkOptions
from regard.server.served_model import ServedModel
from regard.text.chat import DEFAULT_TEMPLATE
from regard.text.tokenizer import Tokenizer
from regard.text.train import bpe
from tests.server.fake_engine import FakeEngine, FakeRecording, fake_lens
from tests.server.page import checked_pages, open_browser

STORY = (
    "Mira put the red lamp into the wooden box. Then she carried the box to the garden, because the kitchen was dark. "
    "Tomas saw the lamp shine through the trees and asked where it came from. The lamp is in the garden, said Mira."
)
REPLY = " The lamp is in the garden, said Mira, and the box is in the kitchen."


class RunningServer(NamedTuple):
    url: str
    client: httpx.Client
    engine: FakeEngine
    app: FastAPI

    @property
    def served(self) -> ServedModel:
        return self.app.state.models.default


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return bpe([STORY] * 4, vocab=340)


@pytest.fixture(scope="session")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    """A small model of speech with random weights."""
    from tests.speech.tiny_whisper import write_tiny_whisper  # imports transformers

    folder = tmp_path_factory.mktemp("whisper")
    write_tiny_whisper(folder)
    return load(folder, device="cpu")


@pytest.fixture(scope="module")  # playwright's event loop must end before other modules call asyncio.run
def browser(chromium: str) -> Iterator:
    with open_browser(chromium) as browser:
        yield browser


@pytest.fixture
def visit(browser) -> Iterator[Callable]:
    """`visit(url, path="/", **options of the browser's context)` opens the page."""
    with checked_pages(browser) as open_page:
        yield open_page


@contextmanager
def serve(app) -> Iterator[int]:
    server = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", 0, log_level="critical", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait for what must come; the limit is far above what a busy machine needs."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"timed out after {seconds} seconds"
        time.sleep(0.002)


@contextmanager
def ending_demos() -> Iterator[None]:
    """At the end of the block the processes that servers started as `regard demo` are killed. They outlive a server by
    design, but Python warns when an object of a running process is deleted, which would fail any later test."""
    children, start = [], DemoProcesses.start

    def recorded(self: DemoProcesses, run: Path, steps: int | None = None) -> None:
        start(self, run, steps)
        children.append(self.children[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DemoProcesses, "start", recorded)
        try:
            yield
        finally:
            for child in children:
                child.kill()
                child.wait()


@pytest.fixture
def started_demos() -> Iterator[None]:
    with ending_demos():
        yield


@contextmanager
def unanswered_post(url: str, path: str, body: dict) -> Iterator[None]:
    """Send a request. At the end of the block its client disconnects, without having read anything."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        yield
    finally:
        connection.close()


@pytest.fixture
def start_server(tokenizer, tmp_path: Path) -> Iterator[Callable[..., RunningServer]]:
    """`start_server(reply, **engine_options)` starts a server, which is stopped after the test.

    every_route: also those of runs, models and adapters, which need folders.
    """
    with ExitStack() as stack:

        def start(
            reply: str = REPLY,
            *,
            key: str | list[str] | None = None,
            lens: Callable | None = FakeRecording,
            template: str | None = DEFAULT_TEMPLATE,
            every_route: bool = False,
            **engine_options,
        ) -> RunningServer:
            fake = FakeEngine(tokenizer, reply, **engine_options)
            served = Tokenizer(tokenizer.core, eos="<|end|>", chat_template=template)
            model = ServedModel("tiny", served, fake, lens=fake_lens(lens) if lens else None)
            network = NetworkOptions(keys=(key,) if isinstance(key, str) else tuple(key or ()))
            if every_route:
                runs = ServedRuns(tmp_path)
                library = ModelLibrary([], EngineOptions(device="cpu"), runs, Console(quiet=True))
                app = create_app([model], network, adapters=tmp_path, runs=runs, library=library)
            else:
                app = create_app([model], network)
            url = f"http://127.0.0.1:{stack.enter_context(serve(app))}"
            headers = {"authorization": f"Bearer {key}"} if key else {}
            client = stack.enter_context(httpx.Client(base_url=url, headers=headers, timeout=60))
            return RunningServer(url, client, fake, app)

        yield start
