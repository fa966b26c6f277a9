"""The web page in a real browser: prompts, streams, token cards and attention maps.

Text is never interpreted as markup, and no other host is contacted.
"""

import pytest

from regard.server.app import create_app
from regard.server.served_model import ServedModel
from tests.server.conftest import REPLY, serve, wait_until
from tests.server.fake_engine import FakeEngine
from tests.server.page import count_colours

pytestmark = pytest.mark.browser
HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=1</script> http://evil.example &amp;'
QUESTION = "Mira put the lamp into the box. Where is the lamp?"


@pytest.fixture
def visit(visit):
    """Opens the page of the root address."""
    return lambda url, **options: visit(url, "/", **options)


def send_prompt(page, text: str) -> None:
    page.fill("#prompt", text)
    page.keyboard.press("Enter")


def wait_for_reply(page):
    page.wait_for_selector(".stats:has-text('per second')")
    return page.locator(".turn.model .content").last


def test_chat_streams_and_tokens_show_their_alternatives(start_server, visit):
    server = start_server()
    page = visit(server.url)
    server.engine.may_step.clear()
    send_prompt(page, QUESTION)
    page.wait_for_selector(".turn.streaming")
    assert page.locator("#stop").is_visible() and page.locator("#send").is_hidden()
    server.engine.may_step.set()
    assert wait_for_reply(page).text_content() == REPLY
    tokens = page.locator(".token")
    assert tokens.count() == len(server.engine.script)
    tokens.nth(2).hover()
    card = page.locator("#card")
    assert card.locator(".row").count() == 8 and card.locator(".row.chosen").count() == 1
    assert "%" in card.inner_text() and "bits" in card.inner_text()
    tokens.nth(0).focus()
    page.keyboard.press("ArrowRight")
    assert tokens.nth(1).evaluate("token => token === document.activeElement")
    assert card.is_visible() and tokens.nth(1).get_attribute("aria-describedby") == "card"
    page.keyboard.press("Escape")
    assert card.is_hidden()


def test_the_attention_map_is_drawn_described_and_switched(start_server, visit):
    page = visit(start_server().url)
    send_prompt(page, QUESTION)
    page.wait_for_selector(".thumbnail")
    page.wait_for_selector("#map")
    assert count_colours(page, "#map") > 50 and count_colours(page, ".thumbnail canvas") > 20
    assert page.locator(".thumbnail").count() == 12
    assert "no attention" in page.locator(".layer-row").nth(2).inner_text()
    page.locator("#map").hover(position={"x": 92 + 3, "y": 92 + 3})
    assert "100.0 %" in page.inner_text("#readout")
    page.locator("#map").focus()
    page.keyboard.press("ArrowDown")
    assert "attends to" in page.inner_text("#readout") and "100.0 %" not in page.inner_text("#readout")
    page.locator(".thumbnail").nth(5).click()
    page.mouse.move(0, 0)
    page.wait_for_selector("#readout:has-text('Layer 1, head 1')")
    assert (page.input_value("#layer"), page.input_value("#head")) == ("1", "1")
    page.select_option("#layer", "3")
    page.wait_for_selector("#readout:has-text('Layer 3, head 0')")
    assert page.locator(".thumbnail[aria-pressed=true]").get_attribute("data-layer") == "3"


@pytest.mark.parametrize("times", [1, 4, 12])
def test_the_whole_attention_map_is_visible(start_server, visit, times):
    page = visit(start_server().url)
    send_prompt(page, QUESTION * times)
    page.wait_for_selector("#map")
    overflow = "part => [part.scrollWidth - part.clientWidth, part.scrollHeight - part.clientHeight]"
    assert page.locator("#map-frame").evaluate(overflow) == [0, 0]
    assert page.locator("#attention").evaluate(overflow)[0] == 0  # the panel scrolls only vertically


def test_continue_mode_continues_a_passage(start_server, visit):
    server = start_server()
    page = visit(server.url)
    page.locator("#mode-continue").check(force=True)
    send_prompt(page, "Tomas saw")
    assert wait_for_reply(page).text_content() == "Tomas saw" + REPLY
    page.click("#send")
    wait_until(lambda: page.locator(".turn .content").text_content() == "Tomas saw" + REPLY + REPLY)
    assert page.locator(".turn").count() == 1


def test_settings_reach_the_engine_and_stop_cancels(start_server, visit):
    server = start_server(repeat=True)
    server.engine.step_seconds = 0.005
    page = visit(server.url)
    page.click("#settings summary")
    page.locator("#temperature").fill("0.3")
    page.locator("#top-p").fill("0.9")
    page.fill("#max-tokens", "2000")
    page.fill("#seed", "42")
    send_prompt(page, QUESTION)
    page.wait_for_selector(".token")
    page.click("#stop")
    page.wait_for_selector(".stats:has-text('stopped')")
    wait_until(lambda: server.engine.idle)
    sampling = server.engine.submitted[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_new, sampling.seed) == (0.3, 0.9, 2000, 42)
    assert len(server.engine.submitted[0].new) < 2000


def test_an_empty_reply_is_reported(start_server, visit):
    page = visit(start_server("").url)
    send_prompt(page, QUESTION)
    page.wait_for_selector(".stats:has-text('ended without any text')")
    assert page.locator(".token").count() == 0


def test_hostile_text_is_inert(start_server, visit):
    page = visit(start_server(HOSTILE).url)
    title = page.title()
    send_prompt(page, HOSTILE)
    assert wait_for_reply(page).text_content() == HOSTILE
    page.wait_for_selector(".thumbnail")
    for token in page.locator(".token").all()[:3]:
        token.hover()
    page.locator("#map").hover(position={"x": 200, "y": 200})
    assert page.title() == title
    assert page.locator("#turns img, #turns script, #turns a, #card img, #readout img").count() == 0


def test_a_missing_key_opens_the_dialog(start_server, browser):
    server = start_server(key="open sesame")
    page = browser.new_page()
    page.goto(server.url)
    page.fill("#key", "open sesame")
    page.keyboard.press("Enter")
    page.wait_for_selector("#facts b")
    assert "tiny" in page.inner_text("#facts")
    page.close()


def test_errors_are_shown_and_the_prompt_is_kept(start_server, visit):
    server = start_server(poison=7)
    page = visit(server.url)
    server.engine.poison = server.engine.script[0]
    send_prompt(page, REPLY)
    page.wait_for_selector("#notice:not([hidden])")
    assert "engine failed" in page.inner_text("#notice")
    assert page.input_value("#prompt") == REPLY and page.locator(".turn").count() == 0
    server.engine.poison = -1
    page.keyboard.press("Enter")
    assert wait_for_reply(page).text_content() == REPLY and page.locator("#notice").is_hidden()


def test_another_model_is_selected_in_the_page(tokenizer, visit):
    models = [ServedModel(name, tokenizer, FakeEngine(tokenizer, f" {name}")) for name in ("lamp", "box")]
    with serve(create_app(models)) as port:
        page = visit(f"http://127.0.0.1:{port}")
        assert page.input_value("#model") == "lamp"
        page.select_option("#model", "box")
        page.wait_for_url("**/?model=box")
        page.wait_for_selector("#model")
        assert page.input_value("#model") == "box" and "box" in page.title()
        send_prompt(page, "Tomas saw")
        assert wait_for_reply(page).text_content() == " box"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phone_width_does_not_overflow(start_server, visit, scheme):
    page = visit(start_server().url, viewport={"width": 360, "height": 740}, color_scheme=scheme)
    send_prompt(page, QUESTION)
    wait_for_reply(page)
    page.wait_for_selector(".thumbnail")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
