"""The web page in a real browser. A visited page must log nothing, set no cookie and contact no other host."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest

PAGE = "/"
FLAGS = "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync"
FLAGS += " --no-first-run --disable-quic"
IDLE_LOOP = 0.08  # seconds that the loop of `slowdown` takes on an idle ARM core


@contextmanager
def open_browser(chromium: str) -> Generator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=FLAGS.split())
        yield browser
        browser.close()


@contextmanager
def checked_pages(browser: Any) -> Generator[Callable[..., Any]]:
    """A function that opens a page, `visit(url, path, **options of the context)`. At the end the pages are closed, and
    there must be no console message, error, cookie or request to another host."""
    messages: list[str] = []
    hosts: set[str] = set()
    contexts = []

    def visit(url: str, path: str = PAGE, **options: Any) -> Any:
        contexts.append(context := browser.new_context(**{"viewport": {"width": 1280, "height": 860}} | options))
        page = context.new_page()
        page.set_default_timeout(30_000)  # a busy machine loads a model in more than ten seconds
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
        page.goto(url + path)
        page.wait_for_selector("#facts b, #facts select", state="attached")
        return page

    yield visit
    for context in contexts:
        assert not context.cookies()
        context.close()
    assert not messages, "\n".join(messages)
    assert len(hosts) <= 1, hosts


def settle(page: Any) -> None:
    """Wait until the page has drawn what its elements say already: Preact calls effects after a frame, the effects draw
    in the next frame, and an effect may render once more."""
    page.evaluate(
        """async () => {
            for (let round = 0; round < 2; round++) {
                await new Promise(requestAnimationFrame);
                await new Promise((resolve) => setTimeout(resolve));
            }
            await new Promise(requestAnimationFrame);
        }"""
    )


def slowdown() -> float:
    """How many times longer than on an idle machine a computation takes at present; at least 1. A limit of seconds is
    multiplied by it, because other tests run at the same time."""
    begin, total = time.perf_counter(), 0
    for i in range(500_000):
        total += i * i & 7
    return max(1.0, (time.perf_counter() - begin) / IDLE_LOOP)


def count_colours(page: Any, canvas: str) -> int:
    """The number of different colours on a canvas, after the page has drawn."""
    settle(page)
    return page.evaluate(
        """(selector) => {
            const canvas = document.querySelector(selector);
            const copy = new OffscreenCanvas(canvas.width, canvas.height); // reading the canvas itself logs a warning
            const context = copy.getContext("2d", { willReadFrequently: true });
            context.drawImage(canvas, 0, 0);
            const { data } = context.getImageData(0, 0, canvas.width, canvas.height);
            const distinct = new Set();
            for (let i = 0; i < data.length; i += 4) distinct.add(data.slice(i, i + 4).join());
            return distinct.size;
        }""",
        canvas,
    )
