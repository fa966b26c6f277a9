"""POST /v1/embeddings and /v1/rerank: vectors of texts, and documents ordered by their relevance to a query.

Embeddings have OpenAI's format. Rerank has the format of Jina, Cohere and vLLM: the relevance is the score of a
cross-encoder, or else the cosine of the embeddings of query and document. A thread computes them in batches.
"""

import base64
import json
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from starlette.responses import JSONResponse, Response
from torch import Tensor

from regard.server.errors import ApiError
from regard.server.model_registry import ModelRegistry
from regard.server.response_bodies import ResponseBody
from regard.server.responses import CLIENT_CLOSED_REQUEST, run_until_disconnect
from regard.server.schema import Name, RequestBody, Text, at_most
from regard.server.served_model import ServedModel, TextEncoder

MAX_TEXTS = 2048  # OpenAI's
BATCH = 32  # texts per part of the work

NonEmpty = Annotated[Text, Field(min_length=1)]
Texts = Annotated[list[NonEmpty], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True), at_most(MAX_TEXTS)]


class EmbeddingBody(RequestBody):
    model: Name | None = None
    input: NonEmpty | Texts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: Name | None = None


class Document(RequestBody):
    text: NonEmpty


class RerankBody(RequestBody):
    model: Name | None = None
    query: NonEmpty
    documents: (
        Texts | Annotated[list[Document], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True), at_most(MAX_TEXTS)]
    )
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None

    @model_validator(mode="after")
    def check_top_n(self) -> "RerankBody":
        if self.top_n is not None and self.top_n > len(self.documents):
            raise ValueError(f"top_n={self.top_n} exceeds the {len(self.documents)} documents; lower it or omit it")
        return self

    @property
    def texts(self) -> list[str]:
        return [document if isinstance(document, str) else document.text for document in self.documents]


class Embedding(ResponseBody):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # base64: little-endian float32


class EmbeddingUsage(ResponseBody):
    prompt_tokens: int
    total_tokens: int


class Embeddings(ResponseBody):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class RankedDocument(ResponseBody):
    index: int
    relevance_score: float
    document: dict[str, str] | None


class Ranking(ResponseBody):
    id: str
    model: str
    results: list[RankedDocument]
    usage: EmbeddingUsage


async def compute(served: ServedModel, request: Request, work: Callable[[list], Any], items: list) -> list | None:
    """The results of `work` on batches of the items; None if the client disconnected."""
    results: list = []
    thread = served.encoder_thread

    async def run() -> None:
        with thread.request():
            for start in range(0, len(items), BATCH):
                results.extend(await thread.run(work, items[start : start + BATCH]))

    try:
        return results if await run_until_disconnect(request, run()) else None
    except ValueError as error:
        raise ApiError(400, str(error), code="invalid_value") from error


async def count_tokens(served: ServedModel, texts: list[str], context: int | None) -> int:
    """The tokens of all texts; 400 if one has more than `context`."""
    total = 0
    for text in texts:
        count = len(await served.encode_with_special_tokens(text))
        if context is not None and count > context:
            message = f"a text has {count} tokens, but this model reads at most {context}; split it"
            raise ApiError(400, message, code="context_length_exceeded")
        total += count
    return total


def embed_as_json(embed: Callable[[Sequence[str]], Tensor], body: EmbeddingBody, texts: list[str]) -> list[str]:
    """The embedding of each text in the format of the request. 400 if it asks for other dimensions."""
    vectors = embed(texts).float().cpu()
    if body.dimensions not in (None, vectors.shape[-1]):
        rule = f"dimensions={body.dimensions}, but the vectors of this model have {vectors.shape[-1]}; omit it"
        raise ApiError(400, rule, code="invalid_value", param="dimensions")
    if body.encoding_format == "base64":
        rows = (base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode() for vector in vectors)
    else:
        rows = (vector.tolist() for vector in vectors)
    # One at a time: the encoder holds the interpreter's lock, and millions of numbers take it a second.
    return [json.dumps(row, separators=(",", ":"), allow_nan=False) for row in rows]


async def relevance(
    served: ServedModel, encoder: TextEncoder, request: Request, body: RerankBody
) -> tuple[list[float] | None, int]:
    """The score of each document, None if the client disconnected, and the number of tokens."""
    texts, query_tokens = body.texts, await count_tokens(served, [body.query], encoder.context)
    if encoder.score is not None:
        context = None if encoder.context is None else encoder.context - query_tokens
        tokens = await count_tokens(served, texts, context) + query_tokens * len(texts)
        return await compute(served, request, encoder.score, [(body.query, text) for text in texts]), tokens
    embed = encoder.embed
    assert embed is not None, "a text encoder has embed or score"
    tokens = await count_tokens(served, texts, encoder.context) + query_tokens
    vectors = await compute(served, request, lambda batch: list(embed(batch).float()), [body.query, *texts])
    return None if vectors is None else [float(vectors[0] @ vector) for vector in vectors[1:]], tokens


def router(models: ModelRegistry) -> APIRouter:
    routes = APIRouter(prefix="/v1")

    @routes.post("/embeddings", responses={200: {"model": Embeddings}})
    async def embeddings(body: EmbeddingBody, request: Request) -> Response:
        served = models.find_for(body)
        encoder = served.encoder
        if encoder is None or encoder.embed is None:
            raise ApiError(404, "this model has no embeddings; serve an encoder", code="no_embeddings")
        texts = [body.input] if isinstance(body.input, str) else body.input
        tokens = await count_tokens(served, texts, encoder.context)
        request.state.body, request.state.usage = body, {"prompt_tokens": tokens}  # for traces and the access log
        vectors = await compute(served, request, partial(embed_as_json, encoder.embed, body), texts)
        if vectors is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        data = [f'{{"object":"embedding","index":{i},"embedding":{vector}}}' for i, vector in enumerate(vectors)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        start = json.dumps({"object": "list", "model": served.name, "usage": usage})
        return Response(f'{start[:-1]},"data":[{",".join(data)}]}}', media_type="application/json")

    @routes.post("/rerank", responses={200: {"model": Ranking}})
    async def rerank(body: RerankBody, request: Request) -> Response:
        served = models.find_for(body)
        encoder = served.encoder
        if encoder is None:
            raise ApiError(404, "this model cannot rank documents; serve an encoder", code="no_embeddings")
        scores, tokens = await relevance(served, encoder, request, body)
        request.state.usage = {"prompt_tokens": tokens}  # for the access log
        if scores is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        texts = body.texts
        order = sorted(range(len(texts)), key=lambda i: (-scores[i], i))[: body.top_n]
        results = [
            {
                "index": i,
                "relevance_score": scores[i],
                "document": {"text": texts[i]} if body.return_documents else None,
            }
            for i in order
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        id = f"rerank-{secrets.token_hex(12)}"
        return JSONResponse({"id": id, "model": served.name, "results": results, "usage": usage})

    return routes
