"""What the page does with damaged storage, a key that is no longer accepted, and responses that are cut off."""

import json

import pytest

from tests.server.page import checked_pages
from tests.server.test_page_chat import ANSWER, QUESTION, send_prompt, wait_for_reply
from tests.server.test_page_history import entries, open_history

pytestmark = pytest.mark.browser

OTHER_VERSION = {
    "theme": "pink",
    "attention": "map",
    "chat-view": 5,
    "sampling-0": {"temperature": "hot", "top_p": None, "max_tokens": {}, "top_k": 3},
    "sampling-1": [1],
    "runs-compared": {"a": 1},
    "runs-curves": {"smooth": "a lot"},
    "instruments-done": 7,
}


def test_values_of_another_version_are_not_used(start_server, visit):
    server = start_server(every_route=True)
    page = visit(server.url)
    for key, value in OTHER_VERSION.items():
        page.evaluate("([key, value]) => localStorage.setItem(key, value)", [f"regard-{key}", json.dumps(value)])
    page.reload()
    page.wait_for_selector("#prompt")
    assert page.locator(".chat-sampling summary").first.inner_text() == "Sampling greedy · k 3"
    assert "Theme: auto" in page.locator(".header .icon-button").get_attribute("title")
    for view in ("attention", "runs", "instruments", "chat"):
        page.goto(f"{server.url}/#/{view}")
        page.wait_for_selector(f".view-{view} :is(h2, #prompt, .notice)")
    send_prompt(page, QUESTION)
    wait_for_reply(page)


def test_a_damaged_conversation_is_named_and_can_be_deleted(start_server, visit):
    page = visit(start_server(lens=None).url)
    send_prompt(page, QUESTION)
    wait_for_reply(page)
    page.evaluate("""() => {
        const about = (id) => JSON.stringify({ id, title: `${id} <b>`, mode: "chat", model: "m", updated: 1 });
        localStorage.setItem("regard-chat old", `${about("old")}\\n{"columns": [{"nodes": {"a": {"role": "x"}}}]}`);
        localStorage.setItem("regard-chat cut", `${about("cut")}\\n{"columns": [{"no`);
        localStorage.setItem("regard-chat none", "null\\n{}");
        const opened = Object.keys(localStorage).find((key) => /^regard-chat n[a-z0-9]{9}/.test(key));
        localStorage.setItem(opened, localStorage.getItem(opened).slice(0, -40));
    }""")
    send_prompt(page, "Where is the box?")  # the opened one is stored again, though what is stored is damaged
    wait_for_reply(page, 2)
    open_history(page)
    assert sorted(entries(page)) == [QUESTION, "cut <b>", "old <b>"]
    for name in ("cut", "old"):
        page.click(f".chat-entry-title:has-text('{name} <b>')")
        page.wait_for_selector(f".chat-history [role=alert]:has-text('“{name} <b>” cannot be read')")
        page.click(f"[aria-label='Delete {name} <b>']")
    assert entries(page) == [QUESTION] and page.locator(ANSWER).count() > 0


def test_a_key_that_is_no_longer_accepted_is_asked_for(start_server, browser):
    with checked_pages(browser) as visit:
        page = visit(start_server(lens=None).url)
        send_prompt(page, QUESTION)
        wait_for_reply(page)
        refusal = {"error": {"message": "the API key is missing or wrong", "code": "invalid_api_key"}}
        page.evaluate(
            """(refusal) => {
                const fetched = window.fetch; // a response of the network with this status would be logged as an error
                window.fetch = (path, options) =>
                    options.headers.authorization === "Bearer new"
                        ? fetched(path, options)
                        : Promise.resolve(new Response(JSON.stringify(refusal), { status: 401 }));
            }""",
            refusal,
        )
        send_prompt(page, "Where is the box?")
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("dialog [role=alert]")
        page.fill("#key", "new")
        page.keyboard.press("Enter")
        page.wait_for_selector("dialog", state="detached")
        assert page.locator(ANSWER).count() > 0  # the conversation is still there
        page.click("#send")  # the prompt was put back
        wait_for_reply(page, 2)


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (200, 'data: {"choices": [{"text": "The", "logprobs": {"content": []}}]}\n\n', "The connection ended before"),
        (502, "<html>Bad Gateway</html>", "The server answered with the status 502."),
    ],
)
def test_responses_that_are_cut_off_or_no_json_are_reported(start_server, visit, status, body, message):
    page = visit(start_server(lens=None).url)
    page.evaluate(
        """([status, body]) => {
            const fetched = window.fetch;
            window.fetch = (path, options) => path === "/v1/completions"
                ? Promise.resolve(new Response(body, { status })) : fetched(path, options);
        }""",
        [status, body],
    )
    send_prompt(page, QUESTION)
    page.wait_for_selector(f".problem:has-text('{message}')")
    assert page.locator("#send").is_visible()


def test_the_error_of_one_model_is_not_shown_with_the_next(start_server, visit):
    page = visit(start_server(lens=None).url)
    page.evaluate("() => { window.fetch = () => Promise.reject(new TypeError('Failed to fetch')); }")
    send_prompt(page, QUESTION)
    page.wait_for_selector(".problem:has-text('The server cannot be reached')")
    page.evaluate("import('/web/state.js').then(({ model }) => (model.value = { ...model.value, name: 'other' }))")
    page.wait_for_selector(".problem", state="detached")
