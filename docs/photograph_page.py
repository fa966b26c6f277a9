"""Photographs the page in Chromium, for the documentation:

    python docs/photograph_page.py RUN [name …]

RUN is a trained demo (`regard demo`). Writes pictures/page.png, pictures/previous_token.png (of SmolLM2, which must be
installed) and pictures/instruments/ID.png, or only those that are named. A picture keeps its description, which
generate_equations.py writes into the documentation as the text for people who do not see it.
"""

import io
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from PIL import Image
from PIL.PngImagePlugin import PngInfo
from playwright.sync_api import Page, sync_playwright

from regard.instruments import INSTRUMENTS

FOLDER = Path(__file__).parent / "pictures"
COLOURS = 256  # of a picture: enough for flat areas and colour scales, at a third of the bytes
PANELS_HEIGHT = 620  # pixels; panels of an instrument below that are left out of its picture
KEEP_PANELS = """(limit) => {
    const frame = document.querySelector(".instrument-panels");
    const top = frame.getBoundingClientRect().top;
    const below = [...frame.children].filter((panel) => panel.getBoundingClientRect().bottom - top > limit);
    for (const panel of below) if (panel !== frame.firstElementChild) panel.style.display = "none";
    frame.style.minHeight = "0";
}"""


@contextmanager
def serve(models: list[str]) -> Iterator[str]:
    """The address of a server with these models."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "regard", "serve", *models, "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            wait_until_ready(f"http://127.0.0.1:{port}/ready", server)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def wait_until_ready(url: str, server: subprocess.Popen) -> None:
    while server.poll() is None:
        try:
            urlopen(url).close()
            return
        except (URLError, ConnectionError):
            time.sleep(0.3)
    raise SystemExit(f"the server has ended with {server.returncode}")


def save(png: bytes, path: Path, description: str) -> None:
    path.parent.mkdir(exist_ok=True)
    picture = Image.open(io.BytesIO(png)).convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE, kmeans=4)
    text = PngInfo()
    text.add_itxt("Description", description)
    picture.save(path, optimize=True, pnginfo=text)
    print(f"{path.name}: {path.stat().st_size:,} bytes")


def photograph_chat(page: Page, url: str) -> None:
    page.set_viewport_size({"width": 1360, "height": 820})
    page.goto(url)
    page.click(".chat-examples button >> nth=1")
    page.wait_for_selector(".chat-stats:has-text('per second')")
    page.wait_for_selector(".attention-head-name:has-text('entropy')")
    page.locator(".chat-model .chat-content .chat-token").first.hover()
    page.wait_for_timeout(500)
    save(page.screenshot(), FOLDER / "page.png", "an answer, the card of a token, and the words that it attends to")


def photograph_previous_token_head(page: Page, url: str) -> None:
    page.set_viewport_size({"width": 1280, "height": 860})
    page.goto(f"{url}/?model=smollm2#/attention")
    page.wait_for_selector(".attention-kind", timeout=120_000)
    page.click(".attention-kind:has-text('previous token')")
    page.wait_for_selector(".attention-facts:has-text('Previous token score')")
    page.wait_for_timeout(1500)
    description = "all heads of SmolLM2, and one that attends to the previous token"
    save(page.screenshot(), FOLDER / "previous_token.png", description)


def photograph_instrument(page: Page, url: str, id: str) -> None:
    page.set_viewport_size({"width": 1360, "height": 900})
    page.goto(f"{url}/#/instruments/{id}")
    page.wait_for_selector(f"#instrument-title:text-is({INSTRUMENTS[id].title!r})")
    page.wait_for_selector(".instrument-panels[aria-busy=false] .instrument-panel")
    page.evaluate("document.fonts.ready")
    page.evaluate(KEEP_PANELS, PANELS_HEIGHT)
    page.wait_for_timeout(300)
    titles = [title for title in page.locator(".instrument-panel:visible h3").all_inner_texts() if title]
    description = "; ".join(titles) or "numbers"
    save(page.locator(".instrument-panels").screenshot(), FOLDER / "instruments" / f"{id}.png", description)


def main(run: str, *names: str) -> None:
    pictures: dict[str, Callable[[Page, str], None]] = {
        "page": photograph_chat,
        "previous_token": photograph_previous_token_head,
    }
    chosen = names or (*pictures, *INSTRUMENTS)
    models = [run, "smollm2"] if "previous_token" in chosen else [run]
    with serve(models) as url, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(color_scheme="light")
        for name in chosen:
            if name in pictures:
                pictures[name](page, url)
            else:
                photograph_instrument(page, url, name)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
