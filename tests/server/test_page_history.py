"""Conversations that the browser keeps: reload, several tabs, rename, delete, export, import, limits."""

import json

import pytest

from tests.server.conftest import REPLY, wait_until
from tests.server.test_page_chat import ANSWER, QUESTION, send_prompt, wait_for_reply

pytestmark = pytest.mark.browser


@pytest.fixture
def page(start_server, visit):
    page = visit(start_server(lens=None).url)
    send_prompt(page, QUESTION)
    wait_for_reply(page)
    return page


def entries(page) -> list[str]:
    return page.locator(".chat-entry-title span").all_inner_texts()


def open_history(page) -> None:
    page.click("text=History")
    page.wait_for_selector(".chat-history")


def test_a_reload_keeps_the_conversation_and_its_tokens(page):
    page.reload()
    page.wait_for_selector(ANSWER)
    assert page.locator(".chat-model .chat-content").inner_text().strip() == REPLY.strip()
    page.locator(ANSWER).nth(2).hover()
    assert page.locator("#card .chat-choice").count() == 8
    page.click("#clear")
    assert page.locator(".chat-turn").count() == 0
    open_history(page)
    page.click(".chat-entry-title")
    page.wait_for_selector(ANSWER)


def test_conversations_are_renamed_and_deleted(page):
    open_history(page)
    assert entries(page) == [QUESTION]
    page.get_by_label(f"Rename {QUESTION}").click()
    page.get_by_label("Title").fill("Lamps")
    page.keyboard.press("Enter")
    page.wait_for_selector(".chat-entry-title:has-text('Lamps')")
    page.get_by_label("Delete Lamps").click()
    assert entries(page) == [] and page.locator(".chat-turn").count() == 0
    send_prompt(page, QUESTION)
    wait_for_reply(page)
    page.click("text=Clear all")
    assert len(entries(page)) == 1  # asks first
    page.click("text=Delete all 1?")
    assert entries(page) == []


def test_another_conversation_is_opened_during_an_answer(start_server, visit):
    server = start_server(lens=None)
    page = visit(server.url)
    send_prompt(page, QUESTION)
    wait_for_reply(page)
    open_history(page)
    page.click("#clear")
    server.engine.may_step.clear()
    send_prompt(page, "Where is the box?")
    page.wait_for_selector(".chat-streaming")
    page.click(".chat-entry-title")
    page.wait_for_selector("#send")  # nothing is generated for this one
    server.engine.may_step.set()
    wait_until(lambda: server.engine.idle)
    page.wait_for_selector(".chat-entry-title:has-text('Where is the box?')")
    assert page.locator(ANSWER).count() == len(server.engine.script) and page.locator(".chat-notice").count() == 0
    server.engine.may_step.clear()
    send_prompt(page, "And the lamp?")
    page.wait_for_selector(".chat-streaming")
    page.get_by_label(f"Delete {QUESTION}").click()
    server.engine.may_step.set()
    wait_until(lambda: server.engine.idle)
    page.wait_for_selector("#welcome")
    assert entries(page) == ["Where is the box?"]
    send_prompt(page, "Mira")
    wait_for_reply(page)
    assert sorted(entries(page)) == ["Mira", "Where is the box?"]


def test_the_page_works_without_storage(start_server, visit):
    page = visit(start_server(lens=None).url)
    blocked = "{ get() { throw new DOMException('blocked', 'SecurityError'); } }"
    for name in ("localStorage", "sessionStorage"):
        page.context.add_init_script(f"Object.defineProperty(window, '{name}', {blocked})")
    page.reload()
    send_prompt(page, QUESTION)
    wait_for_reply(page)
    page.wait_for_selector("text=storage is full or blocked")
    open_history(page)
    assert entries(page) == []


def test_two_tabs_keep_each_others_conversations(page):
    other = page.context.new_page()
    other.goto(page.url)
    other.wait_for_selector("#prompt")
    assert other.locator(".chat-turn").count() == 0
    send_prompt(other, "Where is the box?")
    wait_for_reply(other)
    open_history(page)
    wait_until(lambda: sorted(entries(page)) == sorted([QUESTION, "Where is the box?"]))  # the event of the storage
    page.get_by_role("button", name="Where is the box?").first.click()  # both tabs have it open now
    page.wait_for_selector(ANSWER)
    send_prompt(page, "And the lamp?")
    wait_for_reply(page, 2)
    other.wait_for_selector("text=And the lamp?")
    send_prompt(other, "And Mira?")
    wait_for_reply(other, 3)
    page.wait_for_selector("text=And Mira?")


def test_conversations_are_exported_and_imported(page, tmp_path):
    open_history(page)
    with page.expect_download() as text:
        page.get_by_label("Export").filter(has_text="Markdown").click()
    assert text.value.path().read_text().strip().endswith(REPLY.strip())
    with page.expect_download() as file:
        page.click("text=Export all")
    saved = tmp_path / "saved.json"
    file.value.save_as(saved)
    assert len(json.loads(saved.read_text())["conversations"]) == 1
    page.click("text=Clear all")
    page.click("text=Delete all 1?")
    page.set_input_files("input[type=file]", saved)
    page.wait_for_selector(ANSWER)
    assert entries(page) == [QUESTION]
    data = json.loads(saved.read_text())
    (column,) = data["conversations"][0]["columns"]
    first = column["chosen"][""]
    column["chosen"] = {"": first, first: first}  # a message that follows itself
    del column["system"]
    saved.write_text(json.dumps(data))
    page.set_input_files("input[type=file]", saved)
    wait_until(lambda: entries(page) == [QUESTION, QUESTION])
    page.wait_for_selector(ANSWER)
    broken = tmp_path / "broken.json"
    broken.write_text('{"conversations": [{"mode": "chat"}]}')
    page.set_input_files("input[type=file]", broken)
    page.wait_for_selector("text=is not a file of conversations")
    assert entries(page) == [QUESTION, QUESTION]


def test_a_full_history_removes_the_oldest_and_says_so(page):
    page.evaluate(
        """() => {
            const about = { id: "old", title: "Old", mode: "chat", model: "m", updated: 1 };
            localStorage.setItem("regard-chat old", JSON.stringify(about) + "\\n" + "x".repeat(3_999_000));
        }"""
    )
    send_prompt(page, "And the box?")
    page.wait_for_selector("text=The history is full: the oldest conversation was removed.")
    open_history(page)
    assert entries(page) == [QUESTION]
