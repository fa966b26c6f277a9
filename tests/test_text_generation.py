"""Text from one engine for several callers: batches, threads, asyncio."""

import asyncio
import gc
import threading

import pytest

from regard.engine.request import GenerationError, Request
from regard.language_model import LanguageModel
from tests.server.conftest import wait_until
from tests.training.tiny import SPEC, TOKENIZER

PROMPTS = ["Anna went to the barn", "Ben", "a b c d e f g", "Where"]
GREEDY = {"max_new": 9, "temperature": 0.0}


def build(rows: int = 4) -> LanguageModel:
    return LanguageModel(SPEC.build(seed=3), TOKENIZER, context=200, rows=rows)


@pytest.fixture(scope="module")
def llm() -> LanguageModel:
    return build()


def test_several_conversations_are_answered_in_one_batch(llm: LanguageModel) -> None:
    conversations = ["Where is Anna?", [{"role": "user", "content": "Where is Ben?"}]]
    answers = llm.chat(conversations, **GREEDY)
    assert answers == [llm.chat(conversation, **GREEDY) for conversation in conversations]
    assert llm.chat([], **GREEDY) == []


def test_a_stop_string_ends_its_request_at_once_in_a_batch() -> None:
    llm = build()
    text = llm.generate("Ben", max_new=30, temperature=0)
    before = llm.engine.metrics()["new_tokens"]
    assert llm.generate(["Ben"] * 4, max_new=30, temperature=0, stop=[text[2:4]]) == [text[: text.index(text[2:4])]] * 4
    assert llm.engine.metrics()["new_tokens"] - before < 4 * 30 and llm.engine.idle


def test_awaited_requests_equal_the_synchronous_ones_and_share_steps() -> None:
    llm, messages = build(), [{"role": "user", "content": "Where is Anna?"}]
    expected = llm.generate(PROMPTS, **GREEDY), llm.generate("Ben", **GREEDY), llm.chat([messages] * 2, **GREEDY)
    steps = llm.engine.metrics()["steps"]

    async def together() -> tuple:
        return await asyncio.gather(
            llm.agenerate(PROMPTS, **GREEDY), llm.agenerate("Ben", **GREEDY), llm.achat([messages] * 2, **GREEDY)
        )

    assert tuple(asyncio.run(together())) == expected
    assert asyncio.run(llm.achat(messages, **GREEDY)) == expected[2][0]  # in another event loop
    assert llm.engine.metrics()["steps"] - steps < 60 and llm.engine.idle  # each alone: 8 times 9


def test_an_async_stream_yields_the_text_and_frees_its_row_when_it_ends_early(llm: LanguageModel) -> None:
    messages = [{"role": "user", "content": "Where is Anna?"}]

    async def stream() -> None:
        chunks = [text async for text in llm.astream(messages, **GREEDY)]
        assert len(chunks) > 1 and "".join(chunks) == llm.chat(messages, **GREEDY)
        chunks = llm.astream("Ben", max_new=150, temperature=0)
        await anext(chunks)
        await chunks.aclose()

    asyncio.run(stream())
    wait_until(lambda: llm.engine.idle)


def test_a_cancelled_task_cancels_its_requests() -> None:
    llm = build()

    async def cancel() -> None:
        started = asyncio.Event()

        async def generate() -> None:
            async for _ in llm.astream("Ben", max_new=190, temperature=0):
                started.set()

        tasks = [asyncio.create_task(generate()), asyncio.create_task(llm.agenerate(["Anna"] * 9, max_new=190))]
        await started.wait()
        for task in tasks:
            task.cancel()
        assert all(isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*tasks, return_exceptions=True))

    asyncio.run(cancel())
    wait_until(lambda: llm.engine.idle)
    assert llm.engine.metrics()["cancelled"] > 0


def test_more_async_requests_than_the_queue_holds_wait() -> None:
    llm = build(rows=2)
    llm.engine.queue = 1
    prompts = PROMPTS * 3
    assert asyncio.run(llm.agenerate(prompts, **GREEDY)) == llm.generate(prompts, **GREEDY)


def test_threads_and_asyncio_use_one_engine_at_the_same_time() -> None:
    llm = build()
    expected = {prompt: llm.generate(prompt, max_new=40, temperature=0) for prompt in PROMPTS}
    found: list[tuple[str, str]] = []

    def generate(prompt: str) -> None:
        found.append((prompt, "".join(llm.stream(prompt, max_new=40, temperature=0))))

    threads = [threading.Thread(target=generate, args=(prompt,)) for prompt in PROMPTS]

    async def main() -> list[str]:
        for thread in threads:
            thread.start()
        texts = await llm.agenerate(PROMPTS, max_new=40, temperature=0)
        assert [text async for text in llm.astream("Ben", **GREEDY)] == list(llm.stream("Ben", **GREEDY))
        return texts

    assert asyncio.run(main()) == list(expected.values())
    for thread in threads:
        thread.join()
    assert dict(found) == expected and llm.engine.idle


def test_a_failed_request_raises_its_reason_and_the_others_are_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = build()

    def fail(*args: object) -> None:
        raise RuntimeError("no memory")

    with pytest.raises(ValueError, match="shorten it"):
        asyncio.run(llm.agenerate(["Ben", "long " * 100]))
    monkeypatch.setattr(llm.engine.runner, "forward", fail)
    for generate in (lambda: llm.generate(["Ben", "a"]), lambda: asyncio.run(llm.agenerate(["Ben", "a"]))):
        with pytest.raises(GenerationError, match="the model failed on this request: no memory"):
            generate()
    wait_until(lambda: llm.engine.idle)


def test_the_requests_of_a_failed_step_are_cancelled_under_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, owned = build(), []
    cancel = llm.engine.cancel

    def fail() -> None:
        raise RuntimeError("no memory")

    def checked_cancel(request: Request) -> None:
        owned.append(llm.texts.lock._is_owned())
        cancel(request)

    monkeypatch.setattr(llm.engine, "step", fail)
    monkeypatch.setattr(llm.engine, "cancel", checked_cancel)
    with pytest.raises(GenerationError, match="the engine failed"):
        asyncio.run(llm.agenerate("Ben", **GREEDY))
    assert owned == [True]


def test_a_stream_takes_one_prompt(llm: LanguageModel) -> None:
    with pytest.raises(ValueError, match="'Ben' is not a message"):
        next(llm.stream(["Ben", "Anna"], **GREEDY))


def test_embeddings_can_be_awaited(llm: LanguageModel) -> None:
    assert (asyncio.run(llm.aembed(PROMPTS)) == llm.embed(PROMPTS)).all()


def test_the_thread_ends_with_its_language_model() -> None:
    llm = build()
    asyncio.run(llm.agenerate("Ben", **GREEDY))
    thread = llm.texts.thread._thread
    assert thread.is_alive()
    del llm
    gc.collect()
    thread.join(timeout=60)
    assert not thread.is_alive()
