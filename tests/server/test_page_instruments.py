"""The instruments in a real browser: all of them draw, sliders and clicks change them, questions are answered."""

from collections.abc import Callable, Iterator

import pytest

from regard.engine.engine import Engine
from regard.instruments import INSTRUMENTS
from regard.instruments.measurements import measured
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.server.app import create_app
from regard.server.lens_thread import Lens
from regard.server.served_model import ServedModel
from regard.text.train import byte
from tests.server.conftest import serve
from tests.server.page import PAGE, count_colours
from tests.server.page_checks import assert_accessible, assert_fits

pytestmark = pytest.mark.browser
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    tokenizer = byte()
    block = Block((Sublayer(Attention(2)),))
    model = Decoder(tokenizer.vocab_size, 16, (Repeat((block,)),), context=64).build(seed=0).eval()
    lens = Lens(lambda ids, target: None, (), tokenizer.vocab_size)  # type: ignore[arg-type]  # instruments read the model
    with serve(create_app([ServedModel("tiny", tokenizer, Engine(model, rows=1), lens=lens)])) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def open_instrument(url: str, visit: Callable) -> Callable:
    def open_page(id: str = "", **options):
        page = visit(url, f"{PAGE}#/instruments/{id}", **options)
        page.wait_for_selector(".instrument-panels[aria-busy=false] .instrument-panel")
        return page

    return open_page


def test_every_instrument_draws_its_panels_and_equation(open_instrument) -> None:
    page = open_instrument()
    for id, instrument in INSTRUMENTS.items():
        page.evaluate("id => (location.hash = '/instruments/' + id)", id)
        page.wait_for_selector(f"#instrument-title:text-is({instrument.title!r})")
        page.wait_for_selector(".instrument-panels[aria-busy=false] .instrument-panel")
        drawn = page.locator(".instrument-panel").evaluate_all(
            "all => all.map(part => part.className.split('-').pop())"
        )
        assert drawn == [panel["kind"] for panel in instrument.panels({})]
        assert page.locator(".instrument-head .instrument-formula math").count() == 1
        assert page.locator(".instrument-problem").count() == 0, id
        assert_fits(page)


def test_sliders_and_clicks_change_the_panels(open_instrument) -> None:
    page = open_instrument("masks")
    slider = page.get_by_label("tokens", exact=False).first
    slider.focus()
    for _ in range(6):
        page.keyboard.press("ArrowRight")
    page.wait_for_selector(".instrument-numbers dd:has-text('45')")  # n = 10 blocks n(n - 1)/2 cells
    canvas = page.locator(".instrument-heatmap canvas")
    assert count_colours(page, ".instrument-heatmap canvas") > 5
    box = canvas.bounding_box()
    canvas.click(position={"x": box["width"] - 8, "y": box["height"] - 8})
    page.wait_for_selector("dt:has-text('keys of query 10')")
    page.mouse.move(5, 5)
    canvas.focus()
    page.keyboard.press("ArrowRight")  # to the first cell
    page.keyboard.press("ArrowDown")
    page.wait_for_selector(".instrument-readout:has-text('→')")
    page.keyboard.press("Enter")
    page.wait_for_selector("dt:has-text('keys of query 2')")
    page.get_by_role("button", name="Reset").click()
    page.wait_for_selector("dt:has-text('keys of query 4')")


@pytest.mark.ledger("fig.5.3")
def test_a_click_on_a_gate_opens_its_equation(open_instrument) -> None:
    page = open_instrument("lstm")
    formula = page.locator(".instrument-panel .instrument-formula math")
    forget = formula.text_content()
    page.locator(".instrument-diagram .node", has_text="o").last.click()
    page.wait_for_selector("h3:text-is('o, the output gate')")
    assert formula.count() == 1 and formula.text_content() != forget
    assert page.locator(".instrument-lines text.axis").first.text_content().strip() == "step"


@pytest.mark.ledger("fig.5.31")
def test_a_phase_is_chosen_by_its_box_its_bar_or_the_keyboard(open_instrument) -> None:
    page = open_instrument("phases")
    names = [phase["phase"] for phase in measured("assistant")["phases"]]
    page.locator(".instrument-diagram .node", has_text=names[1]).click()
    page.wait_for_selector(f"h3:has-text('phase 2 of {len(names)}: {names[1]}')")
    page.get_by_role("button", name=names[-1]).press("Enter")
    page.wait_for_selector(f"h3:has-text('phase {len(names)} of {len(names)}: {names[-1]}')")
    page.get_by_role("slider", name="phase").press("Home")
    page.wait_for_selector(f"h3:has-text('phase 1 of {len(names)}: {names[0]}')")
    assert "97 to 3, often quoted, is an illustration" in page.locator("h3").all_inner_texts()[1]


@pytest.mark.ledger("fig.5.33")
def test_ranks_and_findings_are_chosen_by_their_bars(open_instrument) -> None:
    page = open_instrument("lora-rates")
    plot = page.locator(".instrument-lines svg").first
    assert plot.locator(".range").count() == plot.locator("circle").count() > 10
    page.get_by_role("button", name="rank 4").press("Enter")
    page.wait_for_selector("text.axis:has-text('r 4: ×')")
    plot.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("[aria-live]:has-text('LoRA r 4')", state="attached")
    page.get_by_role("button", name="batch size").click()
    page.wait_for_selector(f"h3:has-text('{measured('lora-batch')['verdict']}')")
    rows = page.locator(".instrument-table tbody tr").count()
    assert rows == len(measured("lora-batch")["checks"])


@pytest.mark.ledger("fig.5.28")
def test_a_slider_of_named_formats_is_moved_by_keys_and_bars(open_instrument) -> None:
    page = open_instrument("precision")
    slider = page.get_by_role("slider", name="format")
    assert slider.get_attribute("aria-valuetext") == "FP16"
    page.wait_for_selector(".instrument-numbers dd:text-is('0.62012')")
    slider.press("End")
    page.wait_for_selector("h3:has-text('INT2: each weight')")
    assert page.locator(".field output").first.inner_text() == "INT2"
    page.get_by_role("button", name="NF4").press("Enter")
    page.wait_for_selector("h3:has-text('NF4: each weight')")
    assert slider.get_attribute("aria-valuetext") == "NF4"


@pytest.mark.ledger("fig.5.29")
def test_rounds_of_speculation_follow_the_draft_model_and_its_cost(open_instrument) -> None:
    page = open_instrument("speculative-rounds")
    page.get_by_label("draft model of the rounds").select_option("the model itself")
    page.wait_for_selector("h3:has-text('round 1: 5 proposed, 5 accepted')")
    page.get_by_role("slider", name="acceptance").press("End")
    page.wait_for_selector(".instrument-numbers:has-text('by the formula') dd:text-is('4')")
    page.get_by_role("slider", name="cost of a draft step").press("Home")
    page.wait_for_selector(".instrument-numbers:has-text('by the formula') dd:text-is('6')")
    page.get_by_role("slider", name="round", exact=True).press("ArrowRight")
    page.wait_for_selector("h3:has-text('round 2: 5 proposed')")


@pytest.mark.ledger("fig.5.30")
def test_a_question_of_ones_own_finds_its_passage(open_instrument) -> None:
    page = open_instrument("retrieval")
    page.get_by_label("question", exact=True).fill("where are the bandages?")
    page.wait_for_selector(".instrument-bars li:first-child:has-text('boat.md:6 Emergencies')")
    page.wait_for_selector(".instrument-note:text-is('boat.md, lines 6 to 7')")
    assert page.locator(".instrument-table").first.locator("td:has-text('<source id=')").count() == 2
    page.get_by_role("slider", name="passages").press("Home")
    page.wait_for_selector("h3:has-text('the prompt with 1 sources')")


@pytest.mark.ledger("fig.5.34", "fig.5.35")
def test_a_gan_is_trained_as_far_as_the_slider_goes(open_instrument) -> None:
    page = open_instrument("adversarial-training")
    dots = page.locator(".instrument-scatter circle.unnamed")
    assert 200 < dots.count() <= 300 and page.locator(".instrument-scatter text.name").count() == 0
    assert ": 150 data, " in page.locator(".instrument-scatter svg").get_attribute("aria-label")
    page.get_by_role("slider", name="steps", exact=True).press("Home")
    page.wait_for_selector("h3:text-is('data and samples after 0 steps')")
    page.evaluate("location.hash = '/instruments/best-discriminator'")
    page.get_by_role("slider", name="distance of the means").press("Home")
    page.wait_for_selector(".instrument-numbers:has-text('accuracy of D*') dd:text-is('0.5')")


@pytest.mark.ledger("fig.5.36", "fig.5.37", "fig.5.38")
def test_a_click_on_a_map_of_codes_decodes_its_place(open_instrument) -> None:
    page = open_instrument("dots-and-clouds")
    plane = page.locator(".instrument-scatter svg").last
    assert page.locator(".instrument-scatter ellipse").count() > 40
    box = plane.bounding_box()
    plane.click(position={"x": 0.5 * box["width"], "y": 0.5 * box["height"]})
    page.wait_for_selector("h3:text-is('decoded at (0.00, 0.00)')")
    assert page.locator(".field output").all_inner_texts()[:2] == ["0", "0"]
    assert count_colours(page, ".instrument-pictures canvas") > 5
    page.evaluate("location.hash = '/instruments/code-size'")
    page.get_by_role("slider", name="numbers in the code").press("End")
    page.wait_for_selector(".instrument-numbers dd:text-is('0.00 %')")
    page.evaluate("location.hash = '/instruments/two-pulls'")
    page.get_by_role("slider", name="weight of the KL").press("Home")
    page.wait_for_selector("h3:has-text('β = 0;')")


def test_plots_name_their_axes_marks_and_colours(open_instrument) -> None:
    page = open_instrument("gated-unit")
    texts = [text.strip() for text in page.locator(".instrument-lines text.axis").all_text_contents()]
    assert texts == ["W_gate x", "σ(W_gate x)", "here"]
    assert page.locator(".instrument-scale").inner_text().split() == ["-1.6", "1.6"]
    page.evaluate("location.hash = '/instruments/embeddings'")
    page.wait_for_selector(".instrument-scatter .instrument-legend li:has-text('chosen')")


def test_an_answer_sets_the_controls_and_is_remembered(open_instrument) -> None:
    page = open_instrument("kv-cache")
    page.get_by_role("button", name="Show the answer").click()
    page.wait_for_selector(".instrument-answer:has-text('2.50 GiB')")
    assert page.locator(".instruments-tick.ticked").count() == 1
    page.reload()
    page.wait_for_selector(".instruments-tick.ticked")
    page.locator(".instrument-steps a").last.click()
    page.wait_for_selector("#instrument-title:text-is('The blocks of a paged cache')")


def test_a_refusal_is_shown_and_the_panels_stay(url: str, browser) -> None:
    page = browser.new_page()  # not `visit`: the browser logs the refused request
    page.goto(f"{url}{PAGE}#/instruments/self-attention")
    page.wait_for_selector(".instrument-panels[aria-busy=false] .instrument-panel")
    panels = page.locator(".instrument-panel").count()
    page.get_by_label("words").fill("word " * 15)
    page.wait_for_selector(".instrument-problem:has-text('15 words')")
    assert page.locator(".instrument-panel").count() == panels
    page.get_by_label("words").fill("<img src=x onerror=alert(1)> lamp")
    page.wait_for_selector(".instrument-problem", state="detached")
    assert page.locator("img[src=x]").count() == 0
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(open_instrument, scheme: str) -> None:
    page = open_instrument("experts", color_scheme=scheme)
    assert_accessible(page)
    page.evaluate("location.hash = '/instruments/norms'")
    page.wait_for_selector("#instrument-title:has-text('LayerNorm')")
    page.get_by_role("button", name="Show the answer").click()
    assert_accessible(page)
    for id in ("phases", "lora-rates", "precision", "retrieval", "adversarial-training"):
        page.evaluate("id => (location.hash = '/instruments/' + id)", id)
        page.wait_for_selector(f"#instrument-title:text-is({INSTRUMENTS[id].title!r})")
        page.wait_for_selector(".instrument-panels[aria-busy=false] .instrument-panel")
        assert_accessible(page)


def test_on_a_phone_a_list_replaces_the_course(open_instrument) -> None:
    page = open_instrument("rope", **PHONE)
    assert page.locator(".instruments-course").is_hidden()
    page.get_by_label("Instrument", exact=True).select_option("lora")
    page.wait_for_selector("#instrument-title:text-is('Low-rank adapters')")
    assert_fits(page)
