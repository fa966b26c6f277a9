"""Routes that show the inside of a model: its parts, its residual stream, and activation patching.

    GET  /regard/spec     the parts with parameters, FLOPs, cache, source and shapes
    POST /regard/lens     norms, large activations, and the logit lens as events, the last layer first
    POST /regard/patch    the effects of patching the residual stream as events, or the next tokens for one cell

The thread of the lens computes them, one layer at a time, so that requests take turns and end with their client.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response, StreamingResponse

from regard.lens.inputs import Metric, is_encoder_decoder, logit_difference, part_for_text, vocab_of
from regard.lens.patching import BothRuns
from regard.server.attention_routes import check_sequence
from regard.server.chat_schema import Message
from regard.server.errors import ApiError
from regard.server.inside_schema import MAX_POSITIONS, LensBody, PatchBody
from regard.server.inside_work import Candidate, PromptPair, draw, layer_predictions, overview, record_residual
from regard.server.json_numbers import rounded
from regard.server.model_registry import ModelRegistry
from regard.server.responses import CLIENT_CLOSED_REQUEST, EventStream, data_events, event, run_until_disconnect
from regard.server.schema import Name
from regard.server.served_model import Inspected, ServedModel

MAX_LENS_TOKENS = 1024
MAX_PATCH_TOKENS = 64  # per token and layer, the later layers run once
DEFAULT_POSITIONS = 32
DEFAULT_LENGTH = 1024

Length = Annotated[int, Query(ge=1, le=1 << 24)]


def router(models: ModelRegistry) -> APIRouter:
    routes = APIRouter(prefix="/regard")

    @routes.get("/spec")
    async def spec(model: Annotated[Name | None, Query()] = None, length: Length = DEFAULT_LENGTH) -> dict[str, Any]:
        served = models.default if model is None else models.find(model)
        work = inspected(served)
        with served.lens_thread.request():
            return await compute(served, draw, served, work, length)

    @routes.post("/lens", response_class=StreamingResponse)
    async def lens(body: LensBody, request: Request) -> Response:
        served = models.find_for(body)
        work, stack = inspected(served), ExitStack()
        source, ids = await sequences(served, work, body)

        async def events() -> AsyncIterator[str]:
            recorded = await compute(served, record_residual, work, ids, source)
            depth, positions = len(recorded.streams) - 1, positions_of(body, len(ids))
            start = {"ids": ids, "tokens": await served.token_texts(ids), "layers": depth}
            yield event(start | (await compute(served, overview, recorded)) | {"positions": positions})
            for layer in range(depth, -1, -1) if body.logits else ():
                arguments = (recorded, served.tokenizer, layer, slice(*positions), body.top)
                yield event(await compute(served, layer_predictions, *arguments))

        return await stream(request, served, events(), stack)

    @routes.post("/patch", response_class=StreamingResponse)
    async def patch(body: PatchBody, request: Request) -> Response:
        served = models.find_for(body)
        work, stack = inspected(served), ExitStack()
        clean, corrupted = [await encode(served, text, body.chat) for text in (body.clean, body.corrupted)]
        await check_pair(served, prompt_vocab(text_part(work)), clean, corrupted)

        async def events() -> AsyncIterator[str]:
            pair = await compute(served, PromptPair, work, served.tokenizer, clean, corrupted)
            found, metric, runs = await compare(served, pair, body)
            names = {"tokens": await served.token_texts(clean), "corrupted_tokens": await served.token_texts(corrupted)}
            if body.layer is not None and body.position is not None:
                check_cell(body.layer, body.position, len(pair.names), len(clean))
                cell = (runs, body.layer, body.position, body.top)
                patched = await compute(served, pair.patched_tokens, *cell)
                yield event(found | names | {"patched_top": as_data(patched)})
                return
            yield event(found | names | {"names": pair.names})
            for row, name in enumerate(pair.names):
                effects = await compute(served, pair.effects, runs, name, metric)
                yield event({"row": row, "effects": effects})

        return await stream(request, served, events(), stack)

    return routes


async def compare(served: ServedModel, pair: PromptPair, body: PatchBody) -> tuple[dict[str, Any], Metric, BothRuns]:
    """The next tokens after both prompts, and the tokens, metric and runs that the patches are measured by."""
    clean = await compute(served, pair.next_tokens, pair.clean, body.top)
    corrupted = await compute(served, pair.next_tokens, pair.corrupted, body.top)
    if body.answer is None or body.wrong is None:
        answer, wrong = clean[0].id, corrupted[0].id
        if answer == wrong:
            message = f"the model predicts {clean[0].text!r} after both prompts; change them, or send answer and wrong"
            raise ApiError(400, message, code="invalid_value", param="answer")
    else:
        answer, wrong = [await compute(served, served.tokenizer.single_id, text) for text in (body.answer, body.wrong)]
    metric = logit_difference(answer, wrong)
    runs = await compute(served, pair.run_both, metric)
    texts = await served.token_texts([answer, wrong])
    found = {
        "answer": texts[0],
        "wrong": texts[1],
        "clean": rounded(runs.clean, 6),
        "corrupted": rounded(runs.corrupted, 6),
        "clean_top": as_data(clean),
        "corrupted_top": as_data(corrupted),
    }
    return found, metric, runs


def inspected(served: ServedModel) -> Inspected:
    if served.inspected is None:
        message = "this model cannot be inspected; serve it without an adapter and on one device"
        raise ApiError(404, message, code="no_lens")
    return served.inspected


async def compute(served: ServedModel, function: Callable, *args: Any) -> Any:
    """The result of a function that runs in the thread of the lens; a ValueError becomes a 400."""
    try:
        return await served.lens_thread.run(function, *args)
    except ValueError as error:
        raise ApiError(400, str(error), code="invalid_value") from error


async def stream(request: Request, served: ServedModel, events: AsyncIterator[str], stack: ExitStack) -> Response:
    """The events as a response. The first is computed before the status is sent, so that an error has its own."""
    stack.enter_context(served.lens_thread.request())
    first = ""

    async def begin() -> None:
        nonlocal first
        first = await anext(events)

    async def all_events() -> AsyncIterator[str]:
        yield first
        async for item in events:
            yield item

    try:
        finished = await run_until_disconnect(request, begin())
    except BaseException:  # also a cancelled request: else the lens would count it for ever
        stack.close()
        raise
    if not finished:
        stack.close()
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return EventStream(data_events(all_events()), on_close=stack.close)


async def sequences(served: ServedModel, work: Inspected, body: LensBody) -> tuple[list[int] | None, list[int]]:
    """(source or None, ids): the ids that are read, and the source if they are the target of an encoder-decoder."""
    ids = await encode(served, body.text, body.chat) if body.text is not None else list(body.ids or ())
    part = text_part(work)
    name = "ids" if body.text is None else "text"
    check_sequence(name, ids, min(MAX_LENS_TOKENS, served.prompt_capacity), prompt_vocab(part))
    if body.target is None:
        return None, ids
    if not served.prompt_is_source or work.start is None:
        message = "target is the output of an encoder-decoder, and this model is not one; omit it"
        raise ApiError(400, message, code="invalid_value", param="target")
    target = body.target
    if isinstance(target, str):
        target = await served.encode(target, special_tokens=False) if target else []
    target = [work.start, *target]
    check_sequence("target", target, min(MAX_LENS_TOKENS, served.capacity), vocab_of(part.spec.target))
    return ids, target


def text_part(work: Inspected) -> Any:
    """The part of a model that reads text; 400 if none does."""
    try:
        return part_for_text(work.module)
    except ValueError as error:
        raise ApiError(400, str(error), code="invalid_value") from error


def prompt_vocab(part: Any) -> int:
    return vocab_of(part.spec.source if is_encoder_decoder(part) else part.spec)


async def encode(served: ServedModel, text: str, chat: bool) -> list[int]:
    if chat:
        return await served.encode_chat([Message(role="user", content=text)], add_generation_prompt=True)
    if served.engine is None:
        return await served.encode_with_special_tokens(text)
    return await served.encode(text)


def positions_of(body: LensBody, length: int) -> list[int]:
    """The positions whose predictions are computed: [start, stop)."""
    stop = length if body.stop is None else min(body.stop, length)
    start = max(0, stop - DEFAULT_POSITIONS) if body.start is None else min(body.start, stop - 1)
    return [start, min(start + MAX_POSITIONS, stop)]


async def check_pair(served: ServedModel, vocab: int, clean: list[int], corrupted: list[int]) -> None:
    for name, ids in {"clean": clean, "corrupted": corrupted}.items():
        check_sequence(name, ids, min(MAX_PATCH_TOKENS, served.prompt_capacity), vocab)
    if len(clean) != len(corrupted):
        shown = [" ".join(map(repr, await served.token_texts(ids))) for ids in (clean, corrupted)]
        message = (
            f"the prompts have {len(clean)} and {len(corrupted)} tokens; they need the same number. "
            f"Clean: {shown[0]}. Corrupted: {shown[1]}"
        )
        raise ApiError(400, message, code="invalid_value", param="corrupted")


def check_cell(layer: int, position: int, layers: int, length: int) -> None:
    if layer >= layers:
        raise ApiError(400, f"layer={layer}, but the layers are 0 to {layers - 1}", param="layer")
    if position >= length:
        raise ApiError(400, f"position={position}, but the positions are 0 to {length - 1}", param="position")


def as_data(candidates: list[Candidate]) -> list[dict[str, Any]]:
    return [{"id": c.id, "token": c.text, "probability": rounded(c.probability, 6)} for c in candidates]
