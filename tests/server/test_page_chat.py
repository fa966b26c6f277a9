"""The chat view in a real browser: streams, branches, token cards, settings, comparison, encoder-decoders."""

import pytest

from regard.server.app import create_app
from regard.server.served_model import ServedModel, TextEncoder
from tests.server.conftest import REPLY, serve, wait_until
from tests.server.fake_engine import FakeEngine, fake_embeddings
from tests.server.page_checks import assert_accessible, assert_fits

pytestmark = pytest.mark.browser
HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=1</script> http://evil.example &amp;'
QUESTION = "Mira put the lamp into the box. Where is the lamp?"
TOKENS = ".chat-tokens:not(.chat-end) .chat-token"
ANSWER = f".chat-model .chat-content {TOKENS}"


def send_prompt(page, text: str) -> None:
    page.fill("#prompt", text)
    page.keyboard.press("Enter")


def wait_for_reply(page, count: int = 1):
    wait_until(lambda: page.locator(".chat-stats:has-text('per second')").count() == count)
    return page.locator(".chat-model .chat-content, .chat-passage .chat-content").last


def show_as(page, name: str) -> None:
    page.locator(".chat-bar .segments label", has_text=name).click()


def focused(locator) -> bool:
    return locator.evaluate("element => element === document.activeElement")


def test_an_answer_streams_and_its_tokens_show_their_alternatives(start_server, visit):
    server = start_server(lens=None)
    page = visit(server.url)
    server.engine.may_step.clear()
    send_prompt(page, QUESTION)
    page.wait_for_selector(".chat-streaming")
    assert page.locator("#stop").is_visible() and page.locator("#send").count() == 0
    server.engine.may_step.set()
    assert wait_for_reply(page).inner_text().strip() == REPLY.strip()
    tokens = page.locator(ANSWER)
    assert tokens.count() == len(server.engine.script)
    assert tokens.first.text_content() == "The"  # without the space before it
    tokens.nth(2).hover()
    card = page.locator("#card")
    assert card.locator(".chat-choice").count() == 8 and card.locator(".chat-chosen").count() == 1
    for fact in ("probability", "rank", "surprisal", "entropy\n2.9 bits", f"id {server.engine.script[2]}", "%", "bits"):
        assert fact in card.inner_text()
    assert card.evaluate("card => card.scrollWidth === card.clientWidth")  # nothing is cut off
    page.mouse.move(5, 5)
    assert card.is_hidden()


def test_cards_work_by_keyboard_and_branch_from_an_alternative(start_server, visit):
    server = start_server(lens=None)
    page = visit(server.url)
    send_prompt(page, QUESTION)
    wait_for_reply(page)
    tokens, card = page.locator(ANSWER), page.locator("#card")
    assert page.locator(f"{ANSWER}[tabindex='0']").count() == 1  # one tab stop
    tokens.first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert focused(tokens.nth(2)) and tokens.nth(2).get_attribute("aria-describedby") == "card"
    page.keyboard.press("Enter")
    assert card.get_attribute("role") == "dialog" and focused(card)
    page.keyboard.press("Escape")
    assert card.is_hidden() and focused(tokens.nth(2))
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "chat-choice"
    page.keyboard.press("Enter")
    page.wait_for_selector("text=2/2")
    wait_until(lambda: len(server.engine.submitted) == 2)
    first, branch = server.engine.submitted
    kept = server.engine.script[:2]
    assert list(branch.ids[:-1]) == [*first.ids, *kept] and branch.ids[-1] != server.engine.script[2]
    assert page.locator(ANSWER).nth(1).text_content() == tokens.nth(1).text_content()
    page.wait_for_selector(".chat-stats:has-text('of them new')")
    page.get_by_label("Previous version").click()
    assert page.locator(".chat-model .chat-content").inner_text().strip() == REPLY.strip()


def test_prompt_tokens_have_cards(start_server, visit):
    server = start_server(lens=None)
    page = visit(server.url)
    send_prompt(page, QUESTION)
    wait_for_reply(page)
    page.locator(f".chat-user {TOKENS}").nth(3).click()
    page.wait_for_selector("#card:has-text('60.7 %')")  # exp(-0.5), of the fake engine
    page.locator(ANSWER).nth(3).click()  # a token of the answer, in the same place
    assert f"id {server.engine.script[3]}" in page.inner_text("#card") and "60.7 %" not in page.inner_text("#card")
    page.keyboard.press("Escape")
    page.click(".chat-prompt summary")
    prompt = page.locator(".chat-prompt .chat-token")
    prompt.first.wait_for()
    assert prompt.count() == len(server.engine.submitted[0].ids)
    prompt.first.hover()
    assert "no probability" in page.inner_text("#card")


def test_messages_are_edited_and_answers_regenerated(start_server, visit):
    server = start_server(lens=None)
    page = visit(server.url)
    send_prompt(page, QUESTION)
    wait_for_reply(page)
    page.click("text=Regenerate")
    page.wait_for_selector(".chat-model :text('2/2')")
    wait_for_reply(page)
    page.click(".chat-user >> text=Edit")
    page.fill(".chat-editor textarea", "Where is the box?")
    page.keyboard.press("Enter")
    page.wait_for_selector(".chat-user :text('2/2')")
    wait_for_reply(page)
    assert page.locator(".chat-user .chat-content").inner_text() == "Where is the box?"
    assert len(server.engine.submitted) == 3
    page.get_by_label("Previous version").click()
    assert page.locator(".chat-user .chat-content").inner_text() == QUESTION
    assert page.locator(".chat-model :text('2/2')").count() == 1


def test_a_passage_is_continued_by_its_ids(start_server, visit):
    server = start_server(lens=None)
    page = visit(server.url)
    page.click("text=Continue")
    send_prompt(page, "Tomas saw")
    assert wait_for_reply(page).text_content() == "Tomas saw" + REPLY
    page.click("#send")
    wait_until(lambda: page.locator(".chat-passage .chat-content").text_content() == "Tomas saw" + REPLY + REPLY)
    assert page.locator(".chat-turn").count() == 1
    first, second = server.engine.submitted
    assert list(second.ids) == [*first.ids, *server.engine.script]


def test_settings_reach_the_engine_and_stop_cancels(start_server, visit):
    server = start_server(lens=None, repeat=True)
    server.engine.step_seconds = 0.005
    page = visit(server.url)
    assert "greedy" in page.inner_text(".chat-sampling summary")  # a small vocabulary
    page.click(".chat-sampling summary")
    for label, value in {"Temperature": "0.3", "Top-p": "0.9", "Top-k": "40", "Min-p": "0.1", "Seed": "42"}.items():
        page.get_by_label(label).fill(value)
    page.get_by_label("Repetition penalty").fill("1.2")
    page.get_by_label("Maximum new tokens").fill("2000")
    page.get_by_label("System prompt").fill("Answer briefly.")
    send_prompt(page, QUESTION)
    page.wait_for_selector(ANSWER)
    page.click("#stop")
    page.wait_for_selector(".chat-stats:has-text('stopped')")
    wait_until(lambda: server.engine.idle)
    request = server.engine.submitted[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_new, sampling.seed) == (0.3, 0.9, 2000, 42)
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (40, 0.1, 1.2)
    assert len(request.new) < 2000
    read = server.client.post("/detokenize", json={"tokens": list(request.ids)}).json()["prompt"]
    assert read.index("Answer briefly.") < read.index(QUESTION)
    page.click(".chat-sampling summary")
    page.click("text=Reset to defaults")
    assert "greedy" in page.inner_text(".chat-sampling summary")


def test_an_empty_reply_is_reported(start_server, visit):
    page = visit(start_server("", lens=None).url)
    send_prompt(page, QUESTION)
    page.wait_for_selector(".chat-stats:has-text('ended without any text')")
    assert page.locator(ANSWER).count() == 0


def test_hostile_text_is_inert(start_server, visit):
    page = visit(start_server(HOSTILE, lens=None).url)
    title = page.title()
    send_prompt(page, HOSTILE)
    assert wait_for_reply(page).inner_text().strip() == HOSTILE
    for token in page.locator(ANSWER).all()[:3]:
        token.hover()
    show_as(page, "Markdown")
    assert "<img src=x" in page.locator(".chat-model .markdown").inner_text()
    assert page.title() == title
    assert page.locator(".chat-scroll img, .chat-scroll script, #card img").count() == 0


MARKDOWN = """# Title

Some **bold** `code`, [a link](https://example.org/a), [a trap](javascript:document.title=1), ![a picture](http://e.org/x.png).

- [x] one
- two

```python
if 1 < 2: print("&amp;")
```

| a | b |
|---|---|
| 1 | 2 |
"""


def test_markdown_is_shown_as_elements(start_server, visit):
    page = visit(start_server(MARKDOWN, lens=None).url)
    show_as(page, "Markdown")
    page.click(".chat-sampling summary")
    page.get_by_label("Maximum new tokens").fill("1000")
    send_prompt(page, QUESTION)
    wait_for_reply(page)
    shown = page.locator(".chat-model .markdown")
    assert shown.get_by_role("heading").inner_text() == "Title" and shown.locator("strong").inner_text() == "bold"
    assert shown.locator("pre").inner_text() == 'if 1 < 2: print("&amp;")'
    assert shown.locator("td").all_inner_texts() == ["1", "2"] and shown.locator("li").first.inner_text() == "☑ one"
    links = shown.locator("a")
    assert [link.get_attribute("href") for link in links.all()] == ["https://example.org/a", "http://e.org/x.png"]
    assert all(link.get_attribute("rel") == "noreferrer noopener" for link in links.all())
    assert shown.locator("img").count() == 0 and "javascript:" in shown.inner_text()
    assert_accessible(page)
    show_as(page, "Tokens")
    assert "**" in page.locator(".chat-model .chat-content").inner_text()


def test_errors_are_shown_and_the_prompt_is_kept(start_server, visit):
    server = start_server(lens=None, poison=7)
    page = visit(server.url)
    server.engine.poison = server.engine.script[0]
    send_prompt(page, REPLY)
    page.wait_for_selector(".chat-notice")
    assert "engine failed" in page.inner_text(".chat-notice")
    assert page.input_value("#prompt") == REPLY and page.locator(".chat-turn").count() == 0
    server.engine.poison = -1
    page.keyboard.press("Enter")
    assert wait_for_reply(page).inner_text().strip() == REPLY.strip() and page.locator(".chat-notice").count() == 0


def test_two_models_answer_side_by_side(tokenizer, visit):
    models = [ServedModel(name, tokenizer, FakeEngine(tokenizer, f" {name}")) for name in ("lamp", "box")]
    with serve(create_app(models)) as port:
        page = visit(f"http://127.0.0.1:{port}")
        assert page.input_value("#model") == "lamp"
        page.click("text=Compare")
        page.get_by_label("Model", exact=True).last.select_option("box")
        send_prompt(page, "Tomas saw")
        wait_until(lambda: page.locator(".chat-stats:has-text('per second')").count() == 2)
        assert [text.strip() for text in page.locator(".chat-model .chat-content").all_inner_texts()] == ["lamp", "box"]
        assert_accessible(page)
        page.select_option("#model", "box")
        page.wait_for_url("**model=box**")
        wait_until(lambda: "box" in page.title())


def test_a_comparison_in_which_one_model_fails_is_kept(tokenizer, visit):
    lamp, box = (FakeEngine(tokenizer, f" {name}") for name in ("lamp", "box"))
    models = [ServedModel("lamp", tokenizer, lamp), ServedModel("box", tokenizer, box)]
    with serve(create_app(models)) as port:
        page = visit(f"http://127.0.0.1:{port}")
        page.click("text=Compare")
        page.get_by_label("Model", exact=True).last.select_option("box")
        lamp.poison = tokenizer.encode(" Mira")[0]  # the template puts a space before a message
        box.may_step.clear()
        send_prompt(page, "Mira")
        page.wait_for_selector(".chat-notice")  # the first column has no message, the second is generating
        box.may_step.set()
        wait_for_reply(page)
        lamp.poison = -1
        box.may_step.clear()
        send_prompt(page, "Tomas")
        wait_for_reply(page, 2)
        assert '"finish":null' not in page.evaluate("JSON.stringify(localStorage).replaceAll('\\\\', '')")
        box.may_step.set()
        wait_for_reply(page, 3)
        page.reload()
        page.wait_for_selector(ANSWER)
        assert [text.strip() for text in page.locator(".chat-model .chat-content").all_inner_texts()] == [
            "lamp",
            "box",
            "box",
        ]


def test_an_encoder_decoder_shows_source_and_output(tokenizer, visit):
    engine = FakeEngine(tokenizer, " The lamp")
    engine.source_capacity = 4096
    model = ServedModel("translator", tokenizer, engine, submit_source=engine.submit)
    encoder = ServedModel("vectors", tokenizer, encoder=TextEncoder(fake_embeddings))
    with serve(create_app([model, encoder])) as port:
        page = visit(f"http://127.0.0.1:{port}")
        send_prompt(page, "Mira")
        wait_for_reply(page)
        assert page.locator(".chat-passage .label").all_inner_texts() == ["SOURCE", "OUTPUT"]
        assert page.locator(".chat-passage .chat-content").all_inner_texts() == ["Mira", "The lamp"]
        page.select_option("#model", "vectors")
        page.wait_for_selector("text=generates no text")
        assert page.locator("main a[href='#/inside']").count() == 1 and page.locator("#prompt").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_chat_is_accessible_and_fits_a_phone(start_server, visit, scheme):
    page = visit(start_server(lens=None).url, color_scheme=scheme, has_touch=True)
    assert_accessible(page)
    send_prompt(page, QUESTION)
    wait_for_reply(page)
    page.click("text=History")
    page.locator(ANSWER).nth(2).tap()
    page.wait_for_selector("#card button.chat-choice")
    assert_accessible(page)
    page.click("text=Compare")
    page.set_viewport_size({"width": 360, "height": 740})
    page.click("[aria-label='Close the history']")
    assert_fits(page)
    assert page.locator("#clear").is_visible() and page.locator("#facts b").is_visible()
    page.locator(ANSWER).first.tap()
    assert page.locator("#card").is_visible()  # and stays
    assert_accessible(page)


def test_a_missing_or_wrong_key_opens_the_dialog(start_server, browser):
    page = browser.new_page()
    page.goto(start_server(key="open sesame", lens=None).url)
    page.fill("#key", "wrong")
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog [role=alert]")
    page.fill("#key", "open sesame")
    page.keyboard.press("Enter")
    page.wait_for_selector("#facts b")
    assert "tiny" in page.inner_text("#facts")
    send_prompt(page, QUESTION)
    wait_for_reply(page)
    page.close()


def test_the_panel_shows_the_attention_of_the_answer(start_server, visit):
    server = start_server()
    page = visit(server.url, viewport={"width": 1440, "height": 860})
    send_prompt(page, QUESTION)
    wait_for_reply(page)
    page.wait_for_selector(".chat-attention canvas")
    page.locator(ANSWER).nth(3).hover()
    page.wait_for_selector(".chat-weighted .chat-query")  # words are tinted by the weights of the row
    read_weights = "tokens => tokens.map((token) => Number(token.style.getPropertyValue('--weight')))"
    weights = page.locator(ANSWER).evaluate_all(read_weights)
    assert weights[2] == max(weights) == 1  # the first head attends to the previous token
    assert_accessible(page)
    read_places = "tokens => tokens.map((token) => JSON.stringify(token.getBoundingClientRect()))"
    places = page.locator(TOKENS).evaluate_all(read_places)
    page.locator(".chat-attention canvas").first.click()  # pins a cell
    page.wait_for_selector(".chat-key")
    assert page.locator(TOKENS).evaluate_all(read_places) == places  # the marks move nothing
    query = page.locator(".chat-query").get_attribute("data-row")
    page.locator(f"{TOKENS}:not(.chat-query)").first.hover()
    assert page.locator("#card").is_visible() and page.locator(".chat-query").get_attribute("data-row") == query
    page.get_by_role("button", name="Attention").click()
    assert page.locator(".chat-attention").count() == 0
    page.reload()
    page.wait_for_selector(ANSWER)
    assert page.locator(".chat-attention").count() == 0  # as it was left
