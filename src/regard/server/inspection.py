"""The /regard routes: facts about the model, tokenization, attention maps.

The map of a head has L² numbers for L tokens, so only one head is sent in full. The overview of all heads consists of
thumbnails (the largest weight of every patch) and mean entropies.
"""

from fastapi import APIRouter
from torch import Tensor
from torch.nn.functional import adaptive_max_pool2d

from regard.lens.maps import entropy, row_entropy
from regard.server.chat_schema import AttentionBody, PassageBody
from regard.server.errors import ApiError
from regard.server.served_model import Lens, ServedModel

MAX_MAP_TOKENS = 512
THUMBNAIL_SIZE = 24


def router(served: ServedModel) -> APIRouter:
    routes = APIRouter(prefix="/regard")

    @routes.get("/model")
    async def model() -> dict:
        heads = served.lens.heads if served.lens else ()
        return {
            "name": served.name,
            "layers": len(heads),
            "heads": list(heads),
            "context": served.capacity,
            "vocabulary": served.tokenizer.vocab_size,
            "chat": served.tokenizer.chat_template is not None,
            "attention": served.lens is not None,
        }

    @routes.post("/tokenize")
    async def tokenize(body: PassageBody) -> dict:
        return token_list(served, await encode_passage(served, body, add_generation_prompt=True))

    @routes.post("/attention")
    async def attention(body: AttentionBody) -> dict:
        if served.lens is None:
            raise ApiError(404, "this model has no attention maps; serve a decoder to see them", code="no_lens")
        check_head(served.lens, body)
        ids = await encode_passage(served, body, add_generation_prompt=False)
        limit = min(MAX_MAP_TOKENS, served.capacity)
        if not 1 <= len(ids) <= limit:
            message = f"the text has {len(ids)} tokens; an attention map takes 1 to {limit}"
            raise ApiError(400, message, code="context_length_exceeded")
        maps = await served.engine.call(attention_view, served.lens, ids, body.layer, body.head)
        return token_list(served, ids) | maps

    return routes


async def encode_passage(served: ServedModel, body: PassageBody, add_generation_prompt: bool) -> list[int]:
    if body.messages is not None:
        return await served.encode_chat(body.messages, add_generation_prompt)
    return await served.encode(body.text or "")


def token_list(served: ServedModel, ids: list[int]) -> dict:
    return {"ids": ids, "tokens": [served.tokenizer.decode_token(id) for id in ids]}


def check_head(lens: Lens, body: AttentionBody) -> None:
    if body.layer is None or body.head is None:
        return
    if body.layer >= len(lens.heads):
        raise ApiError(400, f"layer={body.layer}, but the layers are 0 to {len(lens.heads) - 1}", param="layer")
    if body.head >= lens.heads[body.layer]:
        rule = f"has {lens.heads[body.layer]} heads" if lens.heads[body.layer] else "has no attention"
        raise ApiError(400, f"head={body.head}, but layer {body.layer} {rule}", param="head")


def attention_view(lens: Lens, ids: list[int], layer: int | None, head: int | None) -> dict:
    """The full map of one head, or the thumbnails and entropies of all heads. Call it in the engine's thread."""
    maps = lens.maps(ids, layer=layer)  # per layer (H, L, L), or None
    if layer is None:
        return {"layers": [None if weights is None else overview(weights.float()) for weights in maps]}
    weights = maps[0][head].float()  # (L, L)
    return {"layer": layer, "head": head, "weights": rounded(weights, 4), "entropy": rounded(row_entropy(weights), 4)}


def overview(weights: Tensor) -> dict:
    size = min(THUMBNAIL_SIZE, weights.shape[-1])
    thumbnails = adaptive_max_pool2d(weights[None], size)[0]  # (H, size, size)
    return {"thumbnails": rounded(thumbnails, 3), "entropy": rounded(entropy(weights), 4)}


def rounded(values: Tensor, decimals: int) -> list:
    return values.double().round(decimals=decimals).tolist()
