"""/regard/model and /regard/tokenize: facts about a model, and the tokens of a passage."""

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Query

from regard.server.chat_schema import PassageBody
from regard.server.model_registry import ModelRegistry
from regard.server.schema import Name
from regard.server.served_model import ServedModel


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
        ids = await encode_passage(served, body)
        return {"ids": ids, "tokens": await served.token_texts(ids)}

    return routes


async def encode_passage(served: ServedModel, body: PassageBody) -> list[int]:
    if body.messages is not None:
        return await served.encode_chat(body.messages, add_generation_prompt=True)
    if served.engine is None:
        return await served.encode_with_special_tokens(body.text or "")
    return await served.encode(body.text or "")
