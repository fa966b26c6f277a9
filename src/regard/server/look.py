"""The /regard routes: what the model is, how it cuts a text, and where it attends.

A map has the square of the text's length in numbers, so only one head is sent in full; the overview of all heads is
made of thumbnails (the largest weight of each patch) and mean entropies.
"""

from fastapi import APIRouter
from torch import Tensor
from torch.nn.functional import adaptive_max_pool2d

from regard.lens.attention_maps import entropy, row_entropy
from regard.server.errors import ApiError
from regard.server.schema import AttentionBody, PassageBody
from regard.server.service import Lens, Service

MAX_MAP = 512  # tokens: a map has the square of it in numbers
THUMBNAIL = 24


def router(service: Service) -> APIRouter:
    routes = APIRouter(prefix="/regard")

    @routes.get("/model")
    async def model() -> dict:
        heads = service.lens.heads if service.lens else ()
        return {
            "name": service.name,
            "layers": len(heads),
            "heads": list(heads),
            "context": service.capacity,
            "vocabulary": service.tokenizer.vocab_size,
            "chat": service.tokenizer.chat_template is not None,
            "attention": service.lens is not None,
        }

    @routes.post("/tokenize")
    async def tokenize(body: PassageBody) -> dict:
        return tokens(service, await ids_of(service, body, reply=True))

    @routes.post("/attention")
    async def attention(body: AttentionBody) -> dict:
        if service.lens is None:
            raise ApiError(404, "this server was started without a lens", code="no_lens")
        check_head(service.lens, body)
        ids = await ids_of(service, body, reply=False)
        if not 1 <= len(ids) <= min(MAX_MAP, service.capacity):
            rule = f"a map takes 1 to {min(MAX_MAP, service.capacity)}"
            raise ApiError(400, f"the text has {len(ids)} tokens; {rule}", code="context_length_exceeded")
        return tokens(service, ids) | await service.worker.run(view, service.lens, ids, body.layer, body.head)

    return routes


async def ids_of(service: Service, body: PassageBody, reply: bool) -> list[int]:
    if body.messages is not None:
        return await service.encode_chat(body.messages, reply)
    return await service.encode(body.text or "")


def tokens(service: Service, ids: list[int]) -> dict:
    return {"ids": ids, "tokens": [service.tokenizer.token(id) for id in ids]}


def check_head(lens: Lens, body: AttentionBody) -> None:
    if body.layer is None or body.head is None:
        return
    if body.layer >= len(lens.heads):
        raise ApiError(400, f"layer={body.layer}, but the layers are 0 to {len(lens.heads) - 1}", param="layer")
    if body.head >= lens.heads[body.layer]:
        rule = f"has {lens.heads[body.layer]} heads" if lens.heads[body.layer] else "has no attention"
        raise ApiError(400, f"head={body.head}, but layer {body.layer} {rule}", param="head")


def view(lens: Lens, ids: list[int], layer: int | None, head: int | None) -> dict:
    """One map in full, or the thumbnails and entropies of all heads. Runs on the engine's thread."""
    maps = lens.maps(ids, layer=layer)  # per layer (H, L, L) or None
    if layer is not None:
        weights = maps[0][head].float()  # (L, L)
        return {
            "layer": layer,
            "head": head,
            "weights": rounded(weights, 4),
            "entropy": rounded(row_entropy(weights), 4),
        }
    return {"layers": [None if weights is None else overview(weights.float()) for weights in maps]}


def overview(weights: Tensor) -> dict:
    size = min(THUMBNAIL, weights.shape[-1])
    small = adaptive_max_pool2d(weights[None], size)[0]  # (H, size, size)
    return {"thumbnails": rounded(small, 3), "entropy": rounded(entropy(weights), 4)}


def rounded(values: Tensor, decimals: int) -> list:
    return values.double().round(decimals=decimals).tolist()
