"""/regard/attention/overview and /head, /regard/heads: the maps of all heads, one map, and what the heads do.

Maps are large, so they are sent as bytes (binary_arrays.py). A thread computes them (lens_thread.py); if the client
disconnects, its work ends. The forward over a sequence is kept, so that further requests for its maps are quick.
"""

from collections.abc import Coroutine, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from regard.lens.detectors import HeadScores
from regard.server.attention_schema import MAX_MAP_TOKENS, HeadBody, HeadLabels, OverviewBody, SequenceBody
from regard.server.binary_arrays import BINARY_RESPONSE, MEDIA_TYPE
from regard.server.errors import ApiError
from regard.server.json_numbers import rounded
from regard.server.lens_thread import LensThread, Sequences
from regard.server.model_registry import ModelRegistry
from regard.server.responses import CLIENT_CLOSED_REQUEST, run_until_disconnect
from regard.server.schema import Name
from regard.server.served_model import ServedModel

MAX_CELLS = 1 << 22  # of a response, which takes 16 MiB
LABEL_THRESHOLD = 0.4  # a head with a larger score has the label


def router(models: ModelRegistry) -> APIRouter:
    routes = APIRouter(prefix="/regard")

    @routes.post("/attention/overview", response_class=Response, responses=BINARY_RESPONSE)
    async def overview(body: OverviewBody, request: Request) -> Response:
        served = models.find_for(body)
        lens = lens_of(served)
        layers = range_of("layers", body.layers, len(lens.heads))
        return await respond(request, lens.overview(sequences_of(served, lens, body), layers))

    @routes.post("/attention/head", response_class=Response, responses=BINARY_RESPONSE)
    async def head(body: HeadBody, request: Request) -> Response:
        served = models.find_for(body)
        lens = lens_of(served)
        check_head(lens, body.layer, body.head)
        sequences = sequences_of(served, lens, body)
        shape = lens.lens.shape(body.layer, sequences)
        rows, columns = range_of("rows", body.rows, shape.queries), range_of("columns", body.columns, shape.keys)
        check_cells(len(rows), len(columns), body.pool or 1)
        return await respond(request, lens.head(sequences, body.layer, body.head, rows, columns, body.pool or 1))

    @routes.get("/heads")
    async def heads(model: Annotated[Name | None, Query()] = None) -> HeadLabels:
        served = models.default if model is None else models.find(model)
        scores = await lens_of(served).scores()
        if scores is None:
            raise ApiError(404, "the heads of an encoder-decoder are not labelled", code="no_head_labels")
        return labels_of(scores)

    return routes


def lens_of(served: ServedModel) -> LensThread:
    if served.lens is None:
        raise ApiError(404, "this model has no attention maps; serve a decoder or an encoder", code="no_lens")
    return served.lens


def sequences_of(served: ServedModel, lens: LensThread, body: SequenceBody) -> Sequences:
    target = () if not lens.lens.start else (*lens.lens.start, *(body.target or ()))
    if body.target and not target:
        raise ApiError(400, "target is for an encoder-decoder; send all ids as ids", param="target")
    check_sequence("ids", body.ids, min(MAX_MAP_TOKENS, served.prompt_capacity), lens.lens.vocab)
    if target:
        check_sequence("target", target, min(MAX_MAP_TOKENS, served.capacity), lens.lens.target_vocab)
    return tuple(body.ids), target


def check_sequence(name: str, ids: Sequence[int], limit: int, vocab: int) -> None:
    if not 1 <= len(ids) <= limit:
        message = f"{name} has {len(ids)} tokens; the lens of this model takes 1 to {limit}"
        raise ApiError(400, message, code="context_length_exceeded", param=name)
    if max(ids) >= vocab:
        message = f"id {max(ids)} is outside the vocabulary of {vocab}; send ids of this model"
        raise ApiError(400, message, code="invalid_value", param=name)


def check_head(lens: LensThread, layer: int, head: int) -> None:
    if layer >= len(lens.heads):
        raise ApiError(400, f"layer={layer}, but the layers are 0 to {len(lens.heads) - 1}", param="layer")
    if head >= lens.heads[layer]:
        rule = f"has {lens.heads[layer]} heads" if lens.heads[layer] else "has no attention map"
        raise ApiError(400, f"head={head}, but layer {layer} {rule}", param="head")


def check_cells(rows: int, columns: int, pool: int) -> None:
    cells = -(-rows // pool) * -(-columns // pool)
    if cells > MAX_CELLS:
        message = f"{rows} rows and {columns} columns are {cells} weights; a response has at most {MAX_CELLS}"
        raise ApiError(400, f"{message}: send a larger pool, or smaller ranges", code="invalid_value", param="pool")


def range_of(name: str, given: list[int] | None, end: int) -> range:
    first, last = given or (0, end)
    if not 0 <= first < last <= end:
        raise ApiError(400, f"{name}={[first, last]} is not a range within 0 to {end}", param=name)
    return range(first, last)


async def respond(request: Request, work: Coroutine[Any, Any, bytes]) -> Response:
    content = b""

    async def compute() -> None:
        nonlocal content
        content = await work

    if not await run_until_disconnect(request, compute()):
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return Response(content, media_type=MEDIA_TYPE)


def labels_of(scores: HeadScores) -> HeadLabels:
    return HeadLabels(
        threshold=LABEL_THRESHOLD,
        uniform=scores.uniform,
        scores=rounded(scores.scores, 4),
    )
