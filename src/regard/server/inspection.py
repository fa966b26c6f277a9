"""/regard/model and /regard/tokenize: facts about a model, and the tokens of a passage."""

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query

from regard.lens.attention_layers import AttentionLayer
from regard.server.chat_schema import PassageBody
from regard.server.model_registry import ModelRegistry
from regard.server.schema import Name
from regard.server.served_model import ServedModel

MAX_SPANS = 64  # messages whose tokens are found, the last ones: each takes another encoding of the conversation
UNUSED = "\U000f0000"  # a private-use character, whose tokens are in no message


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
            "start_id": served.tokenizer.start_id,
            "chat": served.chats,
            "generates": served.engine is not None and served.speech is None,
            "source": served.prompt_is_source,  # an encoder-decoder: its output does not continue the prompt
            "attention": served.lens is not None,
            "head_labels": served.lens is not None and served.lens.lens.score is not None,
            "attention_layers": list(map(layer_data, served.lens.lens.layers)) if served.lens else [],
        }

    @routes.post("/tokenize")
    async def tokenize(body: PassageBody) -> dict:
        served = models.find_for(body)
        ids = await encode_passage(served, body)
        spans = await passage_spans(served, body, ids)
        return {"ids": ids, "tokens": await served.token_texts(ids), "spans": spans}

    return routes


def layer_data(layer: AttentionLayer) -> dict[str, Any]:
    mixers = [asdict(mixer) | {"implied": mixer.implied} for mixer in layer.mixers]
    return {"stack": layer.stack, "index": layer.index, "mixers": mixers}


async def encode_passage(served: ServedModel, body: PassageBody) -> list[int]:
    if body.messages is not None:
        return await served.encode_chat(body.messages, add_generation_prompt=True)
    if served.engine is None:
        return await served.encode_with_special_tokens(body.text or "")
    return await served.encode(body.text or "")


async def passage_spans(served: ServedModel, body: PassageBody, ids: list[int]) -> list[tuple[int, int] | None]:
    """[first, end) of the text, or of each message, among the ids; None if it has no ids of its own.

    They are the ids that change with the text: a search for it could find the words of the chat template.
    """
    parts = [body.text] if body.messages is None else [message.content for message in body.messages]
    skipped = len(parts) if len(ids) > served.capacity else max(len(parts) - MAX_SPANS, 0)
    spans: list[tuple[int, int] | None] = [None] * skipped
    for i in range(skipped, len(parts)):
        if not isinstance(parts[i], str):  # images
            spans.append(None)
            continue
        if body.messages is None:
            changed = body.model_copy(update={"text": UNUSED})
        else:
            message = body.messages[i].model_copy(update={"content": UNUSED})
            changed = body.model_copy(update={"messages": [*body.messages[:i], message, *body.messages[i + 1 :]]})
        spans.append(changed_span(ids, await encode_passage(served, changed)))
    return spans


def changed_span(ids: list[int], other: list[int]) -> tuple[int, int] | None:
    """[first, end) of `ids` without the prefix and the suffix that both have."""
    shorter = min(len(ids), len(other))
    first = next((i for i in range(shorter) if ids[i] != other[i]), shorter)
    suffix = next((i for i in range(shorter - first) if ids[-1 - i] != other[-1 - i]), shorter - first)
    return (first, len(ids) - suffix) if first < len(ids) - suffix else None
