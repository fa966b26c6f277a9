"""The /regard routes: facts about the model, tokenization, attention maps.

The map of a head has L² numbers for L tokens, so only one head is sent in full. The overview of all heads consists of
thumbnails (the largest weight of every patch) and mean entropies. A thread computes both (lens_thread.py).
"""

import json
from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from regard.server.attention_routes import check_head as check_layer_and_head
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
            "head_labels": served.lens is not None and served.lens.lens.score is not None,
            "attention_layers": [asdict(layer) for layer in served.lens.lens.layers] if served.lens else [],
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
                view = b'{"layers":' + await lens.json_overview(ids) + b"}"
            else:
                view = await lens.json_head(ids, body.layer, body.head)

        if not await run_until_disconnect(request, compute()):
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        named = {} if body.layer is None else {"layer": body.layer, "head": body.head}
        start = json.dumps({"ids": ids, "tokens": await served.token_texts(ids)} | named)
        return Response(start[:-1].encode() + b"," + view[1:], media_type="application/json")

    return routes


async def encode_passage(served: ServedModel, body: PassageBody, add_generation_prompt: bool) -> list[int]:
    if body.messages is not None:
        return await served.encode_chat(body.messages, add_generation_prompt)
    if served.engine is None:
        return await served.encode_with_special_tokens(body.text or "")
    return await served.encode(body.text or "")


def check_head(lens: LensThread, body: AttentionBody) -> None:
    if body.layer is None or body.head is None:
        return
    check_layer_and_head(lens, body.layer, body.head)
