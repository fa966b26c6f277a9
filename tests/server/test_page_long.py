"""The page with passages of a thousand tokens and more: no task is long, and only the part on screen is computed."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
import torch

from regard.lens.attention_layers import AttentionLayer, Mixer, attention_layers
from regard.lens.recorded_attention import RecordedAttention
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.short_convolution import ShortConvolution
from regard.server.app import create_app
from regard.server.lens_thread import Lens
from regard.server.served_model import ServedModel
from regard.text.chat import DEFAULT_TEMPLATE
from regard.text.tokenizer import Tokenizer
from regard.text.train import byte
from tests.server.conftest import serve
from tests.server.fake_engine import FakeEngine
from tests.server.page import count_colours, settle, slowdown
from tests.server.test_page_attention import VIEW, show
from tests.server.test_page_chat import ANSWER, TOKENS, send_prompt

pytestmark = pytest.mark.browser
LAYERS, HEADS = 30, 9
PASSAGE = " the lamp" * 500  # 1,000 tokens


class ManyHeads:
    """Heads that attend to the token some steps earlier, the more steps the later the head."""

    nbytes = 1000

    def __init__(self, ids: Sequence[int], target: Sequence[int] = ()):
        self.length = len(ids)

    def weights(self, layer: int, heads: slice = slice(None), rows: slice = slice(None)) -> torch.Tensor:
        queries, keys = torch.arange(self.length)[rows, None], torch.arange(self.length)
        steps = torch.arange(HEADS)[heads, None, None] + layer
        scores = -(queries - steps - keys).abs() / 2.0
        return scores.masked_fill(keys > queries, -torch.inf).softmax(-1)


@pytest.fixture(scope="module")
def many_heads(tokenizer) -> Iterator[str]:
    layers = tuple(
        AttentionLayer("layers", i, (Mixer("attention", HEADS, kv_heads=3, causal=True),)) for i in range(LAYERS)
    )
    chats = Tokenizer(tokenizer.core, eos="<|end|>", chat_template=DEFAULT_TEMPLATE)
    served = ServedModel("many", chats, FakeEngine(tokenizer, PASSAGE), lens=Lens(ManyHeads, layers, 340))
    with serve(create_app([served])) as port:
        yield f"http://127.0.0.1:{port}"


def longest_task(page, use: Callable) -> float:
    """Of the page's main thread while `use(page)` runs, in milliseconds of CPU time, which other processes on the
    machine do not lengthen as they do the time on the clock."""
    page.context.browser.start_tracing(page=page, categories=["toplevel"])
    use(page)
    settle(page)
    events = json.loads(page.context.browser.stop_tracing())["traceEvents"]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    tasks = [
        event["tdur"]
        for event in events
        if event["name"] == "ThreadControllerImpl::RunTask" and "tdur" in event
        if names.get((event["pid"], event["tid"])) == "CrRendererMain"
    ]
    assert len(tasks) > 100
    return max(tasks) / 1000


def test_the_attention_of_1000_tokens_takes_no_long_task(many_heads, visit):
    page = visit(many_heads, VIEW)
    show(page, PASSAGE)
    page.wait_for_selector(".attention-head-name:has-text('entropy')")
    page.wait_for_load_state("networkidle")  # the other layers of the overview
    assert longest_task(page, use_attention) < 100


def use_attention(page) -> None:
    """Move the pointer over map, heads and words, and type a filter."""
    for i in range(0, 300, 20):
        page.locator(".attention-map").hover(position={"x": 150 + i, "y": 200 + i // 2})
    for i in range(0, 240, 24):
        page.locator(".attention-heads").hover(position={"x": 40 + i, "y": 10 + 2 * i})
    for i in range(0, 900, 90):
        page.locator(".attention-words span").nth(i).hover()
    page.fill("#token-filter", "")
    page.locator("#token-filter").press_sequentially("lamp", delay=20)


@pytest.mark.slow
def test_a_chat_of_2000_tokens_takes_no_long_task(many_heads, visit):
    page = visit(many_heads, viewport={"width": 1440, "height": 860})
    page.click(".chat-sampling summary")
    page.get_by_label("Maximum new tokens").fill("1000")
    page.click(".chat-sampling summary")
    send_prompt(page, PASSAGE)
    page.wait_for_selector(".chat-stats:has-text('per second')")
    assert page.locator(ANSWER).count() == 1000
    page.wait_for_selector(".chat-attention canvas")
    page.locator(ANSWER).nth(900).hover()
    page.wait_for_selector(".chat-weighted .chat-query")  # the map of the panel is known
    assert longest_task(page, use_chat) < 100


def use_chat(page) -> None:
    """Move the pointer over the tokens of prompt and answer and over the panel, open cards, and type a prompt."""
    for tokens in (f".chat-user {TOKENS}", ANSWER):
        for i in range(0, 900, 90):
            page.locator(tokens).nth(i).hover()
    for i in range(0, 200, 20):
        page.locator(".chat-attention canvas").first.hover(position={"x": 20 + i, "y": 20 + i})
    for i in (100, 500, 900):
        page.locator(ANSWER).nth(i).click()
        page.wait_for_selector("#card[role=dialog]")
        page.keyboard.press("Escape")
    page.fill("#prompt", "")
    page.locator("#prompt").press_sequentially("Where is the lamp?", delay=20)


def test_a_long_passage_is_pooled_and_the_part_on_screen_is_exact(many_heads, visit):
    page = visit(many_heads, VIEW)
    show(page, 2 * PASSAGE)
    assert page.inner_text(".attention-passage-facts").startswith("2,000 tokens")
    with page.expect_request("**/regard/attention/head") as asked:
        for _ in range(8):
            page.click(".attention-zoom button[aria-label='Zoom in']")
    body = asked.value.post_data_json
    (first, end), (left, right) = body["rows"], body["columns"]
    assert end - first < 600 and right - left < 600 and "pool" not in body
    with page.expect_response("**/regard/attention/head"):  # the part on screen
        page.locator(".attention-frame").evaluate("frame => frame.scrollTo(frame.scrollWidth, frame.scrollHeight)")
    assert count_colours(page, ".attention-map") > 20
    page.locator(".attention-words span").nth(1990).hover()
    page.wait_for_selector(".attention-words span[style]")
    tinted = page.eval_on_selector_all(
        ".attention-words span[style]", "spans => spans.map(s => Number(s.dataset.index))"
    )
    assert set(tinted) <= set(range(1970, 2000)) and 1990 in tinted


@pytest.fixture(scope="module")
def demo_of_long_context() -> Iterator[str]:
    """A model of the demo's size with random weights."""
    bodies = (ShortConvolution(taps=6), Attention(heads=4), SwiGLU(256))
    layers = (Repeat((Block(tuple(map(Sublayer, bodies))),), 3),)
    model = Decoder(vocab=654, width=128, layers=layers, context=2048).build(seed=1)
    lens = Lens(partial(RecordedAttention, model), attention_layers(model), 654)
    served = ServedModel("long", byte(), FakeEngine(byte(), ""), lens=lens)
    with serve(create_app([served])) as port:
        yield f"http://127.0.0.1:{port}"


def test_attention_of_2000_tokens_opens_within_3_seconds(demo_of_long_context, visit):
    """The fastest of three times, on an idle machine, and in as much longer as other computations take."""
    page = visit(demo_of_long_context, VIEW)
    show(page, "a")  # the first forward of a process is slow
    seconds = []
    for tokens in (2000, 2010, 2020):
        page.click(".attention-passage-facts button")
        page.fill("#passage-text", "the lamp, " * (tokens // 10))
        slower, begin = slowdown(), time.monotonic()
        page.click(".passage-form button[type=submit]")
        page.wait_for_selector(f".attention-passage-facts:has-text('{tokens:,} tokens')")
        page.wait_for_selector(".attention-frame[aria-busy=false]")
        assert count_colours(page, ".attention-map") > 20
        seconds.append((time.monotonic() - begin) / max(slower, slowdown()))
    assert min(seconds) < 3
    page.wait_for_selector(".attention-head-name:has-text('entropy')")
