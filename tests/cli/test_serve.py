"""`regard serve` in a separate process, used by the openai client and by a browser."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

QUESTION = "Anna is in the barn. Where is Anna?"


@pytest.fixture(scope="module")
def address(demo_run: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "regard", "serve", str(demo_run), "--port", "0", "--name", "demo"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        line = server.stderr.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found, line + server.stderr.read()
        yield found[0]
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=20) in (0, -signal.SIGTERM)


def test_the_openai_client_works(address: str) -> None:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["demo"]
        completion = client.completions.create(
            model="demo", prompt="Anna is in", max_tokens=4, logprobs=3, temperature=0
        )
        logprobs = completion.choices[0].logprobs
        assert len(logprobs.tokens) == completion.usage.completion_tokens <= 4
        assert all(len(top) >= 3 for top in logprobs.top_logprobs)
        request = {
            "model": "demo",
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": 6,
            "temperature": 0,
        }
        whole = client.chat.completions.create(**request).choices[0].message.content
        chunks = client.chat.completions.create(**request, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole


@pytest.mark.browser
def test_the_page_chats_and_shows_attention(address: str, chromium: str, tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 860})
        page.set_default_timeout(20_000)
        page.goto(address)
        page.evaluate("document.getElementById('temperature').value = 0")  # sampling may draw a stop token first
        page.fill("#prompt", QUESTION)
        page.keyboard.press("Enter")
        page.wait_for_selector(".stats:has-text('per second')")
        page.locator(".token").first.hover()
        assert "%" in page.locator("#card").inner_text()
        page.wait_for_selector(".thumbnail")
        assert page.locator(".thumbnail").count() == 12  # three layers of four heads
        page.locator(".thumbnail").nth(5).click()
        page.wait_for_selector("#map")
        assert page.screenshot(path=str(tmp_path / "page.png"))
        browser.close()
