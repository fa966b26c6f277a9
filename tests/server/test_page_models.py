"""The view of models in a real browser: load, open, remove, plan and verify."""

import time
from collections.abc import Callable, Collection, Iterator
from itertools import pairwise
from typing import Any

import pytest

from regard.server.app import create_app
from regard.server.network_options import NetworkOptions
from regard.server.served_model import ServedModel
from tests.server.conftest import REPLY, serve
from tests.server.fake_engine import FakeEngine
from tests.server.page_checks import assert_accessible, assert_fits

pytestmark = pytest.mark.browser


class FakeLibrary:
    """Two models, of which one cannot be loaded, and tables of a few rows."""

    def __init__(self, tokenizer) -> None:
        self.tokenizer = tokenizer

    def available(self, served: Collection[str]) -> list[dict[str, Any]]:
        common = {"what": "a run", "installed": True, "remedy": None, "parameters": 579000, "bytes": 2_300_000}
        common |= {"context": 512, "problem": None}
        name = "lamp" if "lamp" in served else None
        missing = {"installed": False, "remedy": "pip install --no-deps nosuch", "bytes": None}
        return [
            {"model": "runs/lamp", "run": "lamp", "served_as": name, **common},
            {"model": "runs/huge", "run": "huge", "served_as": None, **common},
            {"model": "packaged", "run": None, "served_as": None, **common, **missing},
        ]

    def choices(self) -> dict[str, list[str]]:
        return {"recipes": ["llama"], "published": ["gpt2"], "devices": ["h100"], "dtypes": ["float32", "bfloat16"]}

    def find(self, model: str) -> object:
        return model

    def open(self, model: str, taken: Collection[str]) -> ServedModel:
        if model == "runs/huge":
            raise ValueError("the weights of runs/huge need 9 TB of memory, and 1 GB are free; unload a model first")
        return ServedModel("lamp", self.tokenizer, FakeEngine(self.tokenizer, " The lamp"))

    def plan(self, model: str, *_: object) -> dict[str, Any]:
        return {"model": model, "conditions": "context 512", "rows": [["parameters", "total", "579 k"]]}

    def verify(self, model: str, on_law: Callable[[str, str, int], None]) -> dict[str, Any]:
        for _ in range(5):
            on_law("cached = whole", "float64", 5)
            time.sleep(0.05)
        rows = [["cached = whole", "pass", "1e-16", "1e-7", ""], ["packed = separate", "FAIL", "1e-2", "", "a note"]]
        return {"model": model, "length": 24, "ok": False, "rows": rows, "notes": []}


@pytest.fixture
def url(tokenizer) -> Iterator[str]:
    app = create_app([ServedModel("tiny", tokenizer, FakeEngine(tokenizer, REPLY))], library=FakeLibrary(tokenizer))
    with serve(app) as port:
        yield f"http://127.0.0.1:{port}"


def test_models_are_loaded_opened_and_removed(url, visit):
    page = visit(url, "/#/models")
    page.wait_for_selector(".models-card")
    assert page.locator(".models-card button:has-text('Unload')").is_disabled()  # the last one stays
    page.get_by_label("Load runs/lamp").click()
    page.wait_for_selector("text=served as lamp")
    assert page.locator("#facts option").all_text_contents() == ["tiny", "lamp"]
    page.get_by_label("Load runs/huge").click()
    page.wait_for_selector(".models-error:has-text('unload a model first')")
    page.locator(".models-card", has_text="tiny").locator("button:has-text('Unload')").click()
    page.wait_for_selector("#facts b:has-text('lamp')")  # the opened model was removed
    assert page.locator(".models-card").count() == 1
    page.locator(".models-card button:has-text('Open')").click()
    page.wait_for_selector("nav a[aria-current]:has-text('Chat')")


def test_one_request_at_a_time_asks_for_a_model_that_is_being_loaded(url, visit):
    page = visit(url)
    page.evaluate(
        """async () => {
            const ask = window.fetch;
            const listed = await (await ask("/regard/models")).json();
            listed.loading = { model: "runs/lamp", state: "running" };
            window.asked = [];
            window.fetch = (path, ...rest) => {
                if (path !== "/regard/models") return ask(path, ...rest);
                window.asked.push(performance.now());
                return Promise.resolve(Response.json(listed));
            };
            location.hash = "/models";
        }"""
    )
    page.wait_for_selector("td:has-text('loading')")
    page.wait_for_function("() => asked.length > 3")
    assert all(later - earlier > 650 for earlier, later in pairwise(page.evaluate("asked")))  # milliseconds


def test_the_address_names_the_model_and_the_last_choice_counts(tokenizer, browser):
    models = [ServedModel(name, tokenizer, FakeEngine(tokenizer, REPLY)) for name in ("one", "two")]
    with serve(create_app(models, NetworkOptions(keys=("secret",)))) as port:
        page = browser.new_page()  # the browser logs refusals, so no checked page
        page.set_default_timeout(30_000)
        page.goto(f"http://127.0.0.1:{port}/?model=two")
        page.fill("#key", "secret")
        page.click("dialog button")
        page.wait_for_selector("#model")
        assert page.input_value("#model") == "two" and page.title() == "two · regard"
        page.goto(f"http://127.0.0.1:{port}/?model=gone")
        page.wait_for_selector(".problem:has-text('there is no model')")
        assert page.input_value("#model") == "one" and page.evaluate("location.search") == "?model=one"
        late = []
        page.route("**/regard/model?model=two", lambda route: late.append(route))
        page.select_option("#model", "two")
        page.select_option("#model", "one")
        page.wait_for_selector(".problem", state="detached")
        with page.expect_response("**/regard/model?model=two"):
            late[0].continue_()
        page.wait_for_timeout(100)
        assert page.input_value("#model") == "one" and page.title() == "one · regard"
        page.close()


def test_plan_and_verify_show_their_tables(url, visit):
    page = visit(url, "/#/models")
    page.wait_for_selector(".models-groups caption:has-text('parameters')")
    page.locator(".models-plan").get_by_label("Model").fill("gpt2")
    page.wait_for_selector(".models-conditions b:has-text('gpt2')")
    page.locator(".models-verify").get_by_label("Model").select_option("llama")
    page.locator(".models-verify button").click()
    page.wait_for_selector(".models-verify td:has-text('FAIL')")
    assert page.locator(".models-verify td.models-good").text_content() == "pass"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_view_is_accessible_on_desktop_and_phone(url, visit, scheme):
    page = visit(url, "/#/models", color_scheme=scheme)
    page.wait_for_selector(".models-groups")
    assert_accessible(page)
    page.set_viewport_size({"width": 360, "height": 780})
    assert_fits(page)
    assert_accessible(page)
