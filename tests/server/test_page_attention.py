"""The attention view in a real browser: all heads, one map, arcs, words, keyboard and touch."""

import pytest

from regard.server.app import create_app
from regard.server.served_model import ServedModel
from tests.server.conftest import serve
from tests.server.fake_engine import FakeEngine, fake_lens
from tests.server.page import PAGE, count_colours, settle
from tests.server.page_checks import assert_accessible, assert_fits

pytestmark = pytest.mark.browser
VIEW = f"{PAGE}#/attention"
HOSTILE = '<img src=x onerror="document.title=1"> &amp; <b>the lamp</b>'


def show(page, text: str) -> None:
    page.click(".attention-passage-facts button")  # the view begins with an example
    page.fill("#passage-text", text)
    page.click(".passage-form button[type=submit]")
    page.wait_for_selector(".attention-passage")
    page.wait_for_selector(".attention-frame[aria-busy=false]")
    settle(page)  # the map is drawn, and has the pointer of the new passage


def readout(page) -> str:
    return page.inner_text(".attention-readout")


def hover_cell(page, row: int, column: int) -> None:
    """Point at a cell of the whole map with the keyboard."""
    page.locator(".attention-map").focus()
    for key, count in (("ArrowDown", row + 1), ("ArrowRight", column + 1)):
        for _ in range(count):
            page.keyboard.press(key)


def test_all_heads_and_the_selected_one_are_drawn(start_server, visit):
    page = visit(start_server().url, VIEW)
    show(page, "Mira put the lamp into the box. Where is the lamp?")
    page.wait_for_selector(".attention-kind >> text=previous token")
    page.wait_for_selector(".attention-head-name:has-text('entropy')")
    assert count_colours(page, ".attention-heads") > 50 and count_colours(page, ".attention-map") > 50
    hover_cell(page, 1, 0)
    page.wait_for_selector(".attention-readout:has-text('attends to')")
    assert " %" in readout(page) and "bits" in readout(page)
    assert page.locator(".attention-words span.query").count() == 1
    assert page.locator(".attention-words span[style]").count() > 0  # tinted by their weights
    page.locator(".attention-heads").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")  # over the layer without attention
    assert "Layer 3, head 1" in page.inner_text(".attention-head-name")
    page.mouse.move(5, 5)
    page.keyboard.press("ArrowUp")
    assert "Layer 1, head 1" in page.inner_text(".attention-head-name")
    assert "first token 0.80" in page.inner_text(".attention-head-name")


def test_heads_are_filtered_by_label_and_sorted_by_entropy(start_server, visit):
    page = visit(start_server().url, VIEW)
    page.wait_for_selector(".attention-passage-facts:has-text('an example')")
    page.click(".attention-kind:has-text('first token')")  # selects a head with this label
    page.wait_for_selector(".attention-readout:has-text('Layer 0, head 1')")
    page.click(".attention-kind:has-text('previous token')")
    page.wait_for_selector(".attention-readout:has-text('Layer 0, head 0')")
    assert page.get_attribute(".attention-kind:has-text('previous token')", "aria-pressed") == "true"
    page.click(".attention-filters label:has-text('By entropy')")
    page.locator(".attention-heads").click(position={"x": 10, "y": 10})
    assert "previous token 0.80" in page.inner_text(".attention-head-name")
    assert page.locator(".attention-kind:has-text('induction')").is_disabled()


def test_a_word_lights_its_row_and_arcs_show_the_same_head(start_server, visit):
    page = visit(start_server().url, VIEW)
    show(page, "Mira put the lamp into the box.")
    page.locator(".attention-words span").nth(4).hover()
    page.wait_for_selector(".attention-readout:has-text('at 4')")
    before = count_colours(page, ".attention-map")
    page.click(".attention-one label:has-text('Arcs')")
    page.wait_for_selector(".attention-frame[aria-busy=false]")
    page.locator(".attention-words span").nth(5).click()
    page.mouse.move(5, 5)
    page.wait_for_selector(".attention-readout:has-text('pinned')")
    assert before > 50 and count_colours(page, ".attention-map") > 20 and "at 5" in readout(page)
    page.keyboard.press("Escape")
    page.wait_for_selector(".attention-readout:has-text('arcs join a query')")


def test_a_tapped_cell_keeps_its_value(start_server, visit):
    page = visit(start_server().url, VIEW, viewport={"width": 360, "height": 740}, has_touch=True)
    page.wait_for_selector(".attention-frame[aria-busy=false]")
    page.locator(".attention-map").tap(position={"x": 110, "y": 130})
    page.wait_for_selector(".attention-readout:has-text('attends to')")
    page.wait_for_timeout(300)
    assert "pinned" in readout(page)
    assert_fits(page)


def test_options_change_the_map(start_server, visit):
    page = visit(start_server().url, VIEW)
    show(page, "the lamp in the garden " * 4)
    page.evaluate("window.seen = [document.querySelector('.attention-map').toDataURL()]")
    for change in (
        lambda: page.locator("label:has-text('Hide the first token') input").check(),
        lambda: page.select_option("label:has-text('Full colour at') + select", label="largest of each row"),
        lambda: page.select_option("label:has-text('Colour scale') + select", label="linear"),
        lambda: page.locator("label:has-text('Hide below') + input").fill("0.1"),
        lambda: page.fill("#token-filter", "lamp"),
        lambda: page.click(".attention-zoom button[aria-label='Zoom in']"),
    ):
        change()
        page.wait_for_function("() => !seen.includes(document.querySelector('.attention-map').toDataURL())")
        page.evaluate("seen.push(document.querySelector('.attention-map').toDataURL())")


def test_a_known_map_does_not_keep_the_next_passage_waiting(start_server, visit):
    page = visit(start_server().url, VIEW)
    page.wait_for_selector(".attention-frame[aria-busy=false]")
    page.locator(".attention-heads").focus()
    for key, name in (("ArrowRight", "Layer 0, head 1"), ("ArrowLeft", "Layer 0, head 0")):
        page.keyboard.press(key)
        page.wait_for_selector(f".attention-readout:has-text('{name}')")
    show(page, "Mira put the lamp into the box.")  # waits for the map
    assert count_colours(page, ".attention-map") > 20


def test_labels_are_those_of_the_model_and_what_fails_can_be_tried_again(tokenizer, browser):
    models = [ServedModel(name, tokenizer, FakeEngine(tokenizer, ""), lens=fake_lens()) for name in ("one", "two")]
    refusal = {"status": 503, "json": {"error": {"message": "not now", "code": "busy"}}}
    with serve(create_app(models)) as port:
        page = browser.new_page()  # the browser logs refusals, so no checked page
        page.set_default_timeout(30_000)
        page.goto(f"http://127.0.0.1:{port}{VIEW}")
        page.click(".attention-kind:has-text('previous token')")
        page.route("**/regard/heads?model=two", lambda route: route.fulfill(**refusal), times=1)
        page.select_option("#model", "two")
        page.wait_for_selector(".attention-filters:has-text('The heads have no labels: not now')")
        page.wait_for_selector(".attention-frame[aria-busy=false]")
        assert page.locator(".attention-kind").count() == 0 and count_colours(page, ".attention-map") > 20
        show(page, "the lamp in the garden")  # asks for the labels again
        page.wait_for_selector(".attention-kind[aria-pressed=false]:has-text('previous token')")
        page.route("**/regard/attention/head", lambda route: route.fulfill(**refusal), times=1)
        page.locator(".attention-heads").focus()
        page.keyboard.press("ArrowRight")
        page.click(".attention-refusal:has-text('not now') button")
        page.wait_for_selector(".attention-readout:has-text('Layer 0, head 1')")
        page.close()


def test_hostile_text_is_inert(start_server, visit):
    page = visit(start_server().url, VIEW)
    title = page.title()
    show(page, HOSTILE)
    hover_cell(page, 3, 2)
    assert page.locator(".attention-words").text_content() == HOSTILE and page.title() == title
    assert page.locator(".attention-view img, .attention-view b:has-text('lamp')").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_axe_finds_nothing(start_server, visit, scheme, width):
    page = visit(start_server().url, VIEW, color_scheme=scheme, viewport={"width": width, "height": 860})
    page.wait_for_selector(".attention-kind >> text=previous token")
    assert_accessible(page)
    page.click(".attention-passage-facts button")
    page.click(".attention-one label:has-text('Arcs')")
    assert_accessible(page)
