"""The Inside view in a real browser: the drawing, the logit lens, norms, and patching by clicking a cell."""

from collections.abc import Callable, Iterator

import pytest

from regard.engine.engine import Engine
from regard.language_model import LanguageModel
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.cross_attention import CrossAttention
from regard.parts.feedforward import SwiGLU
from regard.parts.input import Tokens
from regard.parts.position.rope import Rope
from regard.parts.ssm.mamba import Mamba
from regard.server.app import create_app
from regard.server.served_model import Inspected, ServedModel, TextEncoder
from regard.text.chat import DEFAULT_TEMPLATE
from regard.text.tokenizer import Tokenizer
from regard.text.tokenizer_folder import GenerationConfig
from regard.text.train import byte
from tests.laws import randomize_weights
from tests.server.conftest import serve
from tests.server.page import PAGE, count_colours
from tests.server.page_checks import assert_accessible, assert_fits

pytestmark = pytest.mark.browser
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True}
TABS = ("model", "lens", "norms", "patching")
CELLS = ".inside-grid-cells canvas"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A hybrid of attention and Mamba, an encoder, and an encoder-decoder."""
    attention = Block((Sublayer(Attention(4, 2, position=Rope())), Sublayer(SwiGLU(48))))
    hybrid = Decoder(261, 32, (Repeat((Block((Sublayer(Mamba(4)),)), attention), 2),), context=128).build(seed=3)
    encoder = Encoder(Tokens(261), 32, (Repeat((attention,), 2),))
    cross = Block((Sublayer(Attention(4)), Sublayer(CrossAttention(4)), Sublayer(SwiGLU(48))))
    translator = EncoderDecoder(encoder, Decoder(261, 32, (Repeat((cross,), 2),))).build(seed=5)
    models = (hybrid, encoder.build(seed=4), translator)
    for model in models:
        randomize_weights(model.eval(), seed=6)
    tokenizer = Tokenizer(byte().core, eos="<|end|>", chat_template=DEFAULT_TEMPLATE)
    llm = LanguageModel(translator, byte(), 64, generation=GenerationConfig(decoder_start_token_id=7))
    served = [
        ServedModel("hybrid", tokenizer, Engine(hybrid, rows=2), inspected=Inspected(hybrid)),
        ServedModel("encoder", byte(), encoder=TextEncoder(lambda texts: None), inspected=Inspected(models[1])),
        ServedModel("translator", byte(), llm.engine, submit_source=llm.submit_source,
                    inspected=Inspected(translator, 7)),
        ServedModel("closed", byte(), Engine(hybrid, rows=2)),
    ]  # fmt: skip
    with serve(create_app(served)) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def open_tab(url: str, visit: Callable) -> Callable:
    def open_page(tab: str = "model", model: str = "hybrid", **options):
        page = visit(url, f"{PAGE}?model={model}#/inside/{tab}", **options)
        page.wait_for_selector(".inside")
        return page

    return open_page


def patch_prompts(page) -> None:
    page.fill("#inside-clean", "the red lamp")
    page.fill("#inside-corrupted", "the old lamp")
    page.fill("#inside-answer", "e")
    page.fill("#inside-wrong", "q")
    page.click("text=Patch every cell")
    page.wait_for_selector(CELLS)


def test_the_model_is_drawn_and_parts_open(open_tab) -> None:
    page = open_tab()
    page.wait_for_selector(".inside-part")
    assert "× 2" in page.inner_text(".inside-run") and "mamba" in page.inner_text(".inside-diagram")
    page.click(".inside-part:has-text('attention')")
    panel = page.locator(".inside-panel")
    assert panel.locator("math").count() == 3  # attention, its rotary positions and its mask
    panel.get_by_text("Activations").click()
    text = panel.inner_text()
    assert "regard/parts/attention.py" in text and "q_proj" in text and "B × 4 × L × 8" in text
    before = page.inner_text(".inside-totals")
    page.get_by_label("Length of the sequence").fill("12")
    page.wait_for_selector(".inside-totals:has-text('4,096')")
    assert page.inner_text(".inside-totals") != before
    page.locator(".inside-part[aria-pressed=true]").focus()
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.dataset.part") == "stack.blocks.1.sublayers.1.norm"
    assert page.locator(".inside-part[tabindex='0']").count() == 1


def test_the_logit_lens_fills_and_is_read_by_pointer_and_keys(open_tab) -> None:
    page = open_tab("lens")
    page.wait_for_selector(CELLS)
    page.wait_for_selector(".inside-reading:has-text('After the last block')")
    page.wait_for_selector(".inside-reading:not(:has-text('of 5 layers'))")
    assert count_colours(page, CELLS) > 20 and page.locator(".inside-candidates li").count() == 5
    page.locator(CELLS).focus()
    for _ in range(4):
        page.keyboard.press("ArrowDown")
    page.wait_for_selector(".inside-reading:has-text('Embeddings')")
    page.click("text=Edit")
    page.fill("#passage-text", "<b>lamp</b>")
    page.click("text=Read it")
    page.wait_for_selector(".inside-passage:has-text('<b>lamp</b>')")
    assert page.locator(".inside-passage b").count() == 0


def test_norms_and_largest_activations_are_shown(open_tab) -> None:
    page = open_tab("norms")
    page.wait_for_selector(CELLS)
    assert count_colours(page, CELLS) > 10 and page.locator(".inside-largest tbody tr").count() == 12
    page.locator(CELLS).hover(position={"x": 60, "y": 10})
    assert "after block 3" in page.inner_text(".inside-reading")


def test_a_clicked_cell_changes_the_answer(open_tab) -> None:
    page = open_tab("patching")
    patch_prompts(page)
    page.wait_for_selector("button:has-text('Stop')", state="detached")
    box = page.locator(CELLS).bounding_box()
    row, column = box["height"] / 5, box["width"] / 12
    page.locator(CELLS).click(position={"x": 11.5 * column, "y": 0.5 * row})  # the last position after the last block
    page.wait_for_selector(".inside-patched")
    answers = page.locator(".inside-candidates")
    assert answers.count() == 3 and answers.nth(2).inner_text() == answers.nth(0).inner_text()
    assert answers.nth(1).inner_text() != answers.nth(0).inner_text()
    page.locator(CELLS).click(position={"x": 11.5 * column, "y": 0.5 * row})  # again
    page.wait_for_timeout(100)
    assert page.locator(".inside-patched").is_visible()


def test_an_encoder_shows_norms_and_says_why_it_has_no_logit_lens(open_tab) -> None:
    page = open_tab("lens", "encoder")
    page.wait_for_selector(".problem:has-text('no head for tokens')")
    page.click("text=Norms")
    page.wait_for_selector(CELLS)


def test_refusals_of_the_server_are_shown(url, browser) -> None:  # the browser logs them, so no checked page
    page = browser.new_page()
    page.goto(f"{url}{PAGE}?model=closed#/inside")
    page.wait_for_selector(".notice:has-text('cannot be inspected')")
    page.goto(f"{url}{PAGE}?model=encoder#/inside/patching")
    page.reload()
    page.click("text=Patch every cell")
    page.wait_for_selector(".problem:has-text('tokens; they need the same number')")
    page.fill("#inside-corrupted", page.input_value("#inside-clean").replace("i", "o"))
    page.click("text=Patch every cell")
    page.wait_for_selector(".problem:has-text('predicts no next token')")
    page.close()


def test_both_sides_of_an_encoder_decoder(open_tab) -> None:
    page = open_tab("model", "translator")
    page.wait_for_selector(".inside-part")
    assert page.locator(".inside-stack h2").all_inner_texts()[0].startswith("Encoder")
    page.click("text=Patching")
    patch_prompts(page)
    page.wait_for_selector("button:has-text('Stop')", state="detached")
    assert count_colours(page, CELLS) > 5


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [{}, PHONE], ids=["desktop", "phone"])
def test_every_tab_fits_and_axe_finds_nothing(open_tab, scheme, size) -> None:
    page = open_tab(color_scheme=scheme, **size)
    for tab, drawn in zip(TABS, (".inside-part", CELLS, CELLS, "#inside-clean"), strict=True):
        page.evaluate("tab => (location.hash = '/inside/' + tab)", tab)
        page.wait_for_selector(drawn)
        if tab == "patching":
            patch_prompts(page)
        assert_fits(page)
        assert_accessible(page)
