"""The /regard/instruments routes: the table of instruments, and the panels of one for given controls.

A thread computes the panels, so the event loop stays free. Instruments that read a model get the served one, if it is
a decoder with a lens; a copy of its modules shares the weights, so no hooks run in the engine's modules. An instrument
can also ask its engine for metrics, and time a short request to it. Those that read training runs get their folder.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from pydantic import Field
from starlette.responses import Response

from regard.engine.async_engine import AsyncEngine, Failure, RequestHandle
from regard.engine.request import RequestOptions, Sampling, Token
from regard.instruments import COURSE, INSTRUMENTS, Subject, subject_of
from regard.server.errors import ApiError
from regard.server.generation import request_failed, submission_errors
from regard.server.model_registry import ModelRegistry
from regard.server.response_bodies import ResponseBody
from regard.server.responses import CLIENT_CLOSED_REQUEST, run_until_disconnect
from regard.server.run_routes import Runs
from regard.server.schema import Name, RequestBody, Text, at_most
from regard.server.served_model import ServedModel
from regard.server.worker_thread import WorkerThread, stopping
from regard.spec import suggest_name

MAX_CONTROLS = 32


class InstrumentBody(RequestBody):
    """The controls that differ from their defaults."""

    model: Name | None = None  # that instruments read; None: the first one
    controls: Annotated[
        dict[Name, bool | int | float | Text], Field(max_length=MAX_CONTROLS), at_most(MAX_CONTROLS)
    ] = {}


class Chapter(ResponseBody):
    title: str
    instruments: list[dict[str, Any]]


class Course(ResponseBody):
    chapters: list[Chapter]


class InstrumentPanels(ResponseBody):
    id: str
    controls: dict[str, Any]
    panels: list[dict[str, Any]]


def router(models: ModelRegistry, runs: Runs | None) -> APIRouter:
    thread = WorkerThread("instruments")
    routes = APIRouter(prefix="/regard", lifespan=stopping(thread))
    course = Course(
        chapters=[
            Chapter(title=title, instruments=[INSTRUMENTS[id].describe() for id in ids])
            for title, ids in COURSE.items()
        ]
    )

    @routes.get("/instruments")
    async def instruments() -> Course:
        return course

    @routes.post("/instruments/{id}", response_model=InstrumentPanels)
    async def compute(
        id: Annotated[str, Path(max_length=64)], body: InstrumentBody, request: Request
    ) -> InstrumentPanels | Response:
        if id not in INSTRUMENTS:
            raise ApiError(404, f"there is no instrument {id!r}; {suggest_name(id, INSTRUMENTS)}", code="not_found")
        served, instrument = models.default if body.model is None else models.find(body.model), INSTRUMENTS[id]
        values, panels, loop = checked(instrument.values, body.controls), [], asyncio.get_running_loop()

        def compute_panels() -> list[dict[str, Any]]:
            subject = subject_served(served, loop) if instrument.reads_model else None
            return checked(instrument.panels, values, subject, None if runs is None else runs.folder)

        async def work() -> None:
            with thread.request():
                panels.extend(await thread.run(compute_panels))

        if not await run_until_disconnect(request, work()):  # the slider has moved on
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return InstrumentPanels(id=id, controls=values, panels=panels)

    return routes


def subject_served(served: ServedModel, loop: asyncio.AbstractEventLoop) -> Subject | None:
    """The served model for instruments, None if they cannot read it; called in their thread."""
    engine = served.engine
    if served.lens is None or engine is None:
        return None
    subject = subject_of(served.name, getattr(engine.engine, "model", None), served.tokenizer)
    if subject is None:
        return None

    def wait(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    return subject._replace(
        metrics=lambda: wait(engine.call(engine.engine.metrics)),
        arrivals=lambda ids, new: wait(arrivals(engine, ids, new, RequestOptions(adapter=served.adapter))),
    )


async def arrivals(engine: AsyncEngine, ids: list[int], new: int, options: RequestOptions) -> list[float]:
    """Seconds from the submission of a request to the engine until each of its new tokens arrives here."""
    start, times = time.perf_counter(), list[float]()
    finished = asyncio.get_running_loop().create_future()

    def on_token(event: Token | Failure) -> None:
        times.append(time.perf_counter() - start)
        if isinstance(event, Failure):
            finished.set_exception(request_failed(event))
        elif event.finish is not None:
            finished.set_result(times)

    handle = RequestHandle(ids, Sampling(max_new=new, temperature=0), on_token, options=options)
    with submission_errors():
        await engine.submit([handle])
    return await finished


def checked(function: Callable[..., Any], *args: Any) -> Any:
    """The result of the function; 400 for controls that it refuses."""
    try:
        return function(*args)
    except ValueError as error:
        raise ApiError(400, str(error), code="invalid_value", param="controls") from error
