"""The view of training runs in a real browser: curves that grow, comparison, samples, and the demo from its button."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from regard.cli import demo_process
from regard.cli.served_runs import ServedRuns
from regard.server.app import create_app
from regard.server.served_model import ServedModel
from tests.server.conftest import REPLY, serve
from tests.server.fake_engine import FakeEngine
from tests.server.page import count_colours
from tests.server.page_checks import assert_accessible, assert_fits
from tests.server.test_run_routes import append, write_run

pytestmark = pytest.mark.browser
HOSTILE = '<img src=x onerror="document.title=1">'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    write_run(folder / "demo", steps=80, of=100)
    write_run(folder / "other", steps=30, source="text")
    (folder / "demo" / "samples.txt").write_text(f"step 20\n    the lamp is red\n\nstep 40\n    the lamp {HOSTILE}\n\n")
    return folder


@pytest.fixture
def url(folder, tokenizer) -> Iterator[str]:
    app = create_app([ServedModel("tiny", tokenizer, FakeEngine(tokenizer, REPLY))], runs=ServedRuns(folder))
    with serve(app) as port:
        yield f"http://127.0.0.1:{port}"


def plotted(page) -> None:
    page.wait_for_selector(".runs-curves canvas")
    # a function: an expression is evaluated again for each attempt, which the policy of the page forbids
    page.wait_for_function("() => document.querySelector('.runs-curves .chart-entry b').textContent !== '–'")


def test_curves_grow_are_compared_and_read(url, folder, visit):
    page = visit(url, "/#/runs")
    page.locator("tr", has_text="demo").locator("input").check()
    plotted(page)
    assert count_colours(page, ".runs-curves canvas") > 10
    assert page.locator(".runs-monitors .panel").count() >= 2  # gradient norm and learning rate
    page.locator("tr", has_text="other").locator("input").check()
    page.wait_for_selector(".chart-entry:has-text('other, training')")
    entry = page.locator(".runs-curves .chart-entry", has_text="other, training")
    entry.click()
    assert entry.get_attribute("aria-pressed") == "false"
    page.locator(".runs-curves .chart-plot").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(".runs-curves [aria-live]:has-text('step 2: ')", state="attached")
    page.get_by_label("log y").uncheck()
    page.get_by_text("tokens", exact=True).first.click()
    page.wait_for_selector(".runs-curves .chart-plot[aria-label^='Loss over tokens']")
    append(folder / "demo", range(81, 91))
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # asks at once
    page.wait_for_selector("tr:has-text('demo') >> text=90 / 100")


def test_samples_are_shown_as_text(url, visit):
    page = visit(url, "/#/runs")
    page.locator("tr", has_text="demo").locator("input").check()
    page.locator("tr", has_text="other").locator("input").uncheck()
    page.wait_for_selector(".runs-sample:has-text('lamp')")
    assert page.locator(".runs-sample").text_content() == f"the lamp {HOSTILE}"
    page.get_by_label("After step").fill("0")
    assert page.locator(".runs-sample").text_content() == "the lamp is red"
    assert page.locator(".runs-sample img").count() == 0 and page.title() == "tiny · regard"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_view_is_accessible_on_desktop_and_phone(url, visit, scheme):
    page = visit(url, "/#/runs", color_scheme=scheme)
    page.locator("tr", has_text="demo").locator("input").check()
    plotted(page)
    assert_accessible(page)
    page.set_viewport_size({"width": 360, "height": 780})
    assert_fits(page)
    assert_accessible(page)


def test_the_demo_is_started_watched_and_stopped(url, folder, visit, monkeypatch, started_demos):
    """A program that writes a log takes the place of `regard demo`."""
    script = f"""
import json, sys, time
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
out = Path(sys.argv[sys.argv.index("--out") + 1])
(out / "checkpoints").mkdir()
config = {{"train": {{"steps": 1000}}, "data": {{"source": "world"}}, "model": {{"kind": "decoder"}}}}
(out / "config.json").write_text(json.dumps(config))
with (out / "metrics.jsonl").open("w") as log:
    for step in range(1, 1000):
        log.write(json.dumps({{"step": step, "loss": 5 / step, "tokens": step}}) + "\\n")
        log.flush()
        time.sleep(0.02)
"""
    monkeypatch.setattr(demo_process, "COMMAND", [*demo_process.COMMAND[:1], "-c", script])
    page = visit(url, "/#/runs")
    page.click("button:has-text('Train another: demo-2')")
    page.wait_for_selector(".runs-demo progress")
    page.wait_for_selector("tr:has-text('demo-2')")
    page.wait_for_selector(".runs-curves canvas")
    page.click(".runs-demo button:has-text('Stop')")
    page.wait_for_selector("button:has-text('Continue demo-2')")
    assert json.loads((folder / "demo-2" / "process.json").read_text())["pid"] > 1


def test_without_runs_the_demo_is_explained(tmp_path, tokenizer, visit):
    runs = ServedRuns(tmp_path / "runs")
    app = create_app([ServedModel("tiny", tokenizer, FakeEngine(tokenizer, REPLY))], runs=runs)
    with serve(app) as port:
        page = visit(f"http://127.0.0.1:{port}", "/#/runs")
        page.wait_for_selector("h2:has-text('No runs yet')")
        assert page.locator("button.primary:has-text('Start the demo')").is_visible()
        assert_accessible(page)
