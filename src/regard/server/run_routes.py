"""The /regard/runs routes: training runs in a folder, their metrics and samples, and the demo as a process.

The server gets an object that reads the folder (`Runs`). It is called in one thread beside the event loop, since a
log may have a million lines.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.responses import Response

from regard.server.errors import ApiError
from regard.server.response_bodies import ResponseBody, Status
from regard.server.schema import Name, RequestBody
from regard.server.worker_thread import WorkerThread, stopping

MAX_RUNS = 16  # in a request for metrics
RunName = Annotated[str, Field(min_length=1, max_length=512)]


class Runs(Protocol):
    """A folder of runs, as the fields of the responses below. Methods raise LookupError for a run that is not there,
    ValueError for what cannot be done."""

    folder: Path

    def listing(self) -> dict[str, Any]: ...

    def metrics(self, name: str, cursor: str | None, columns: Sequence[str] | None, points: int) -> dict[str, Any]: ...

    def samples(self, name: str) -> Sequence[Mapping[str, Any]]: ...

    def start(self, name: str, steps: int | None) -> None: ...

    def stop(self, name: str) -> None: ...


class RunPosition(RequestBody):
    """A run, and the cursor of the last response; without it, all of its metrics."""

    run: RunName
    cursor: Annotated[str, Field(max_length=64)] | None = None


class RunMetricsBody(RequestBody):
    runs: Annotated[list[RunPosition], Field(min_length=1, max_length=MAX_RUNS, fail_fast=True)]
    columns: Annotated[list[Name], Field(max_length=64, fail_fast=True)] | None = None
    points: Annotated[int, Field(ge=10, le=5000)] = 1000


class StartDemoBody(RequestBody):
    run: Annotated[str, Field(min_length=1, max_length=64)] = "demo"
    steps: Annotated[int, Field(ge=1, le=1_000_000)] | None = None


class StopDemoBody(RequestBody):
    run: Annotated[str, Field(min_length=1, max_length=64)]


class ListedRun(ResponseBody):
    run: str
    state: str  # finished, stopped, running, damaged
    stage: str  # the state, or starting, stopping, answering
    model: str
    parameters: int | None
    objective: str
    data: str
    step: int
    steps: int | None
    tokens: int
    loss: float | None
    held_out_loss: float | None
    best_held_out_loss: float | None
    best_step: int | None
    tokens_per_second: float | None
    started: float | None
    changed: float
    problems: list[str]
    is_demo: bool
    exact_match: float | None
    can_stop: bool


class DemoProcess(ResponseBody):
    run: str
    stage: str  # starting, stopping, failed
    output: list[str]


class RunList(ResponseBody):
    folder: str
    runs: list[ListedRun]
    process: DemoProcess | None
    may_start: bool


class RunCurve(ResponseBody):
    steps: list[int]
    values: list[float]
    low: list[float] | None
    high: list[float] | None


class RunCurves(ResponseBody):
    cursor: str
    restarted: bool
    curves: dict[str, RunCurve]


class RunMetricsList(ResponseBody):
    runs: dict[str, RunCurves]


class RunSample(ResponseBody):
    step: int
    text: str


class RunSamples(ResponseBody):
    samples: list[RunSample]


def router(runs: Runs | None, may_manage: bool) -> APIRouter:
    """runs: None: there are no such routes. may_manage: whether clients may start and stop the demo."""
    routes = APIRouter(prefix="/regard/runs")
    if runs is None:
        return routes
    routes.lifespan_context = stopping(thread := WorkerThread("runs", limit=32))

    async def call(function: Callable, *args: Any) -> Any:
        with thread.request():
            try:
                return await thread.run(function, *args)
            except LookupError as error:
                raise ApiError(404, str(error.args[0]), code="run_not_found", param="run") from error
            except ValueError as error:
                raise ApiError(409, str(error), code="run_conflict", param="run") from error

    @routes.get("")
    async def list_runs() -> RunList:
        return RunList(**await call(runs.listing), may_start=may_manage)

    @routes.post("/metrics", response_model=RunMetricsList)
    async def metrics(body: RunMetricsBody) -> Response:
        found = {}
        for position in body.runs:
            found[position.run] = await call(runs.metrics, position.run, position.cursor, body.columns, body.points)
        return Response(await call(metrics_json, found), media_type="application/json")

    @routes.get("/samples")
    async def samples(run: Annotated[RunName, Query()]) -> RunSamples:
        return RunSamples(samples=await call(runs.samples, run))

    @routes.post("/start")
    async def start(body: StartDemoBody) -> Status:
        check_allowed(may_manage)
        await call(runs.start, body.run, body.steps)
        return Status(status="ok")

    @routes.post("/stop")
    async def stop(body: StopDemoBody) -> Status:
        check_allowed(may_manage)
        await call(runs.stop, body.run)
        return Status(status="ok")

    return routes


def metrics_json(found: dict[str, Any]) -> str:
    """The body of the response: millions of numbers, so not made in the event loop."""
    return RunMetricsList(runs=found).model_dump_json()


def check_allowed(may_manage: bool) -> None:
    if not may_manage:
        message = "other hosts or origins may call this server without a key, so it starts, loads and removes nothing"
        raise ApiError(403, f"{message}; start it with --key", code="key_required")
