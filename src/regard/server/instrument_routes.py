"""The /regard/instruments routes: the table of instruments, and the panels of one for given controls.

A thread computes the panels, so the event loop stays free. Instruments that read a model get the served one, if it is
a decoder with a lens; a copy of its modules shares the weights, so no hooks run in the engine's modules.
"""

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from pydantic import Field
from starlette.responses import Response

from regard.instruments import COURSE, INSTRUMENTS, subject_of
from regard.server.errors import ApiError
from regard.server.model_registry import ModelRegistry
from regard.server.response_bodies import ResponseBody
from regard.server.responses import CLIENT_CLOSED_REQUEST, run_until_disconnect
from regard.server.schema import Name, RequestBody, Text, at_most
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


def router(models: ModelRegistry) -> APIRouter:
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
        values, panels = checked(instrument.values, body.controls), []

        def compute_panels() -> list[dict[str, Any]]:
            subject = None
            if instrument.reads_model and served.lens is not None and served.engine is not None:
                subject = subject_of(served.name, getattr(served.engine.engine, "model", None), served.tokenizer)
            return checked(instrument.panels, values, subject)

        async def work() -> None:
            with thread.request():
                panels.extend(await thread.run(compute_panels))

        if not await run_until_disconnect(request, work()):  # the slider has moved on
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return InstrumentPanels(id=id, controls=values, panels=panels)

    return routes


def checked(function: Callable[..., Any], *args: Any) -> Any:
    """The result of the function; 400 for controls that it refuses."""
    try:
        return function(*args)
    except ValueError as error:
        raise ApiError(400, str(error), code="invalid_value", param="controls") from error
