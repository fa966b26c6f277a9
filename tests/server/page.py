"""The web page in a real browser. A visited page must log nothing, set no cookie and contact no other host."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest

PAGE = "/"
FLAGS = "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync"
FLAGS += " --no-first-run --disable-quic"


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


def count_colours(page: Any, canvas: str) -> int:
    """The number of different colours on a canvas."""
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
