"""The JSON bodies of the attention routes. Token ids come from /regard/tokenize, or from a generation."""

from typing import Annotated

from pydantic import Field, model_validator

from regard.server.response_bodies import ResponseBody
from regard.server.schema import Id, Ids, Name, RequestBody, at_most

MAX_MAP_TOKENS = 4096
MAX_POOL = 64

Index = Annotated[int, Field(ge=0, lt=1 << 16)]
Range = Annotated[list[Index], Field(min_length=2, max_length=2), at_most(2)]  # [first, end], without the end


class SequenceBody(RequestBody):
    """`target` is the output of an encoder-decoder, whose source `ids` are; other models have none."""

    model: Name | None = None
    ids: Ids
    target: Annotated[list[Id], Field(fail_fast=True, max_length=MAX_MAP_TOKENS)] | None = None


class OverviewBody(SequenceBody):
    """All layers, or a range of them."""

    layers: Range | None = None


class HeadBody(SequenceBody):
    """The map of one head, or a range of its rows (queries) and columns (keys).

    pool: the side of a square of weights of which the largest is sent.
    """

    layer: Index
    head: Index
    rows: Range | None = None
    columns: Range | None = None
    pool: Annotated[int, Field(ge=1, le=MAX_POOL)] | None = None

    @model_validator(mode="after")
    def check_pool(self) -> "HeadBody":
        for name in ("rows", "columns"):
            given = getattr(self, name)
            if self.pool is not None and given is not None and given[0] % self.pool:
                raise ValueError(f"{name} start at {given[0]}; with pool={self.pool} they start at a multiple of it")
        return self


class HeadLabels(ResponseBody):
    """Scores of the heads of each layer by kind, null for a layer without a map; `uniform` attention has those."""

    threshold: float
    uniform: dict[str, float]
    scores: dict[str, list[list[float | None] | None]]
