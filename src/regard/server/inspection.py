"""The /regard routes: facts about the model, tokenization, attention maps.

The map of a head has L² numbers for L tokens, so only one head is sent in full. The overview of all heads consists of
thumbnails (the largest weight of every patch) and mean entropies. A thread computes both (lens_thread.py).
"""

import json
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from regard.server.chat_schema import AttentionBody, PassageBody
from regard.server.errors import ApiError
from regard.server.lens_thread import LensThread
from regard.server.model_registry import ModelRegistry
from regard.server.responses import CLIENT_CLOSED_REQUEST, run_until_disconnect
from regard.server.schema import Name
from regard.server.served_model import ServedModel

MAX_MAP_TOKENS = 512


def router(models: ModelRegistry) -> APIRouter:
    routes = APIRouter(prefix="/regard")

    @routes.get("/model")
    async def describe(model: Annotated[Name | None, Query()] = None) -> dict:
        served = models.default if model is None else models.find(model)  # the page asks before it knows any name
        heads = served.lens.heads if served.lens else ()
        return {
            "name": served.name,
            "models": models.names,
            "layers": len(heads),
            "heads": list(heads),
            "context": served.capacity,
            "vocabulary": served.tokenizer.vocab_size,
            "chat": served.chats,
            "generates": served.engine is not None and served.speech is None,
            "source": served.prompt_is_source,  # an encoder-decoder: its output does not continue the prompt
            "attention": served.lens is not None,
        }

    @routes.post("/tokenize")
    async def tokenize(body: PassageBody) -> dict:
        served = models.find_for(body)
        ids = await encode_passage(served, body, add_generation_prompt=True)
        return {"ids": ids, "tokens": await served.token_texts(ids)}

    @routes.post("/attention", response_class=JSONResponse)
    async def attention(body: AttentionBody, request: Request) -> Response:
        served = models.find_for(body)
        if served.lens is None:
            raise ApiError(404, "this model has no attention maps; serve a decoder to see them", code="no_lens")
        check_head(served.lens, body)
        ids = await encode_passage(served, body, add_generation_prompt=False)
        limit = min(MAX_MAP_TOKENS, served.capacity)
        if not 1 <= len(ids) <= limit:
            message = f"the text has {len(ids)} tokens; an attention map takes 1 to {limit}"
            raise ApiError(400, message, code="context_length_exceeded")
        lens, view = served.lens, b""

        async def compute() -> None:
            nonlocal view
            if body.layer is None or body.head is None:
                view = b'{"layers":' + await lens.overview(ids) + b"}"
            else:
                view = await lens.head(ids, body.layer, body.head)

        if not await run_until_disconnect(request, compute()):
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        named = {} if body.layer is None else {"layer": body.layer, "head": body.head}
        start = json.dumps({"ids": ids, "tokens": await served.token_texts(ids)} | named)
        return Response(start[:-1].encode() + b"," + view[1:], media_type="application/json")

    return routes


async def encode_passage(served: ServedModel, body: PassageBody, add_generation_prompt: bool) -> list[int]:
    if body.messages is not None:
        return await served.encode_chat(body.messages, add_generation_prompt)
    return await served.encode(body.text or "")


def check_head(lens: LensThread, body: AttentionBody) -> None:
    if body.layer is None or body.head is None:
        return
    if body.layer >= len(lens.heads):
        raise ApiError(400, f"layer={body.layer}, but the layers are 0 to {len(lens.heads) - 1}", param="layer")
    if body.head >= lens.heads[body.layer]:
        rule = f"has {lens.heads[body.layer]} heads" if lens.heads[body.layer] else "has no attention"
        raise ApiError(400, f"head={body.head}, but layer {body.layer} {rule}", param="head")
