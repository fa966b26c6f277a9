"""The bodies of the /regard/models routes (model_routes.py)."""

from typing import Annotated, Literal

from pydantic import Field

from regard.server.response_bodies import ResponseBody
from regard.server.schema import Name, RequestBody

ListedName = Annotated[str, Field(min_length=1, max_length=512)]


class LoadModelBody(RequestBody):
    model: ListedName


class UnloadModelBody(RequestBody):
    model: ListedName


class PlanBody(RequestBody):
    model: ListedName
    context: Annotated[int, Field(ge=1, le=1 << 30)] | None = None
    batch: Annotated[int, Field(ge=1, le=1 << 20)] = 1
    dtype: Name = "float32"
    weights: Name | None = None
    device: Name | None = None


class VerifyBody(RequestBody):
    model: ListedName


class ServedModelCard(ResponseBody):
    model: str
    does: str  # chat, completion, encoding …
    parameters: int | None
    bytes: int | None  # of the weights in memory
    cache_bytes: int | None  # of keys and values, at most
    context: int | None
    dtype: str | None
    device: str | None
    rows: int | None  # requests that are decoded at once
    adapters: list[str]
    loads_adapters: bool
    busy: bool


class StoredModelCard(ResponseBody):
    model: str
    what: str
    run: str | None
    installed: bool
    remedy: str | None
    parameters: int | None
    bytes: int | None
    context: int | None
    served_as: str | None
    problem: str | None


class Work(ResponseBody):
    """A model that is loaded or verified. name: of the loaded model. done: steps of `total`."""

    model: str
    state: Literal["running", "done", "failed"]
    done: int = 0
    total: int | None = None
    now: str = ""
    name: str | None = None
    error: str | None = None


class PlanChoices(ResponseBody):
    recipes: list[str]
    published: list[str]
    devices: list[str]
    dtypes: list[str]


class ModelsList(ResponseBody):
    served: list[ServedModelCard]
    available: list[StoredModelCard]
    loading: Work | None
    adapters: list[str] | None  # of the server's folder of adapters
    choices: PlanChoices
    may_load: bool


class PlanTable(ResponseBody):
    model: str
    conditions: str
    rows: list[list[str]]  # group, quantity, number


class LawTable(ResponseBody):
    model: str
    length: int
    ok: bool
    rows: list[list[str]]  # law, result, float64, float32, note
    notes: list[str]


class Verification(ResponseBody):
    work: Work | None
    table: LawTable | None
