"""The FastAPI application: middleware, routes, monitoring, and the web page at `/`."""

import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import APIRouter, FastAPI
from fastapi.middleware import Middleware
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse
from starlette.staticfiles import StaticFiles

from regard.engine.async_engine import AsyncEngine, Submit
from regard.engine.engine import Engine
from regard.server import chat, completions, errors, inspection
from regard.server.errors import ApiError
from regard.server.lens_thread import Lens, LensThread
from regard.server.middleware import (
    LOCAL_HOSTS,
    MAX_BODY,
    BodyLimit,
    HostCheck,
    KeyCheck,
    ResponseCounter,
    SecurityHeaders,
)
from regard.server.served_model import ServedModel
from regard.text.tokenizer import Tokenizer

WEB = Path(__file__).parent.parent / "web"


def create_app(
    engine: Engine,
    tokenizer: Tokenizer,
    name: str,
    *,
    key: str | None = None,
    lens: Lens | None = None,
    submit_source: Submit | None = None,
    hosts: tuple[str, ...] = LOCAL_HOSTS,
    max_body: int = MAX_BODY,
) -> FastAPI:
    """`hosts` are the host names that the server accepts. An empty tuple accepts all names and requires a key.

    `submit_source` submits a prompt as the source of an encoder-decoder; None: a decoder continues the prompt.
    """
    if not hosts and key is None:
        raise ValueError("hosts=() lets any site call the server; set a key or name the hosts")
    prompt_is_source = submit_source is not None
    lens_thread = None if lens is None else LensThread(lens)
    served = ServedModel(
        name, int(time.time()), AsyncEngine(engine, submit_source), tokenizer, lens_thread, prompt_is_source
    )
    response_counts: Counter = Counter()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        await served.start()
        yield
        await served.stop()

    middleware = [
        Middleware(ResponseCounter, counts=response_counts),
        Middleware(SecurityHeaders),
        Middleware(HostCheck, hosts=hosts),
        Middleware(KeyCheck, key=key),
        Middleware(BodyLimit, max_body=max_body),
    ]
    app = FastAPI(
        title="regard",
        middleware=middleware,
        lifespan=lifespan,
        responses={"4XX": {"model": errors.ErrorBody}, "5XX": {"model": errors.ErrorBody}},
        docs_url=None,  # FastAPI's documentation pages load scripts from other hosts
        redoc_url=None,
    )
    app.state.served = served
    errors.install_handlers(app)
    app.include_router(monitoring_routes(served, response_counts))
    for routes in (completions, chat, inspection):
        app.include_router(routes.router(served))

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(WEB / "index.html")

    app.mount("/web", StaticFiles(directory=WEB))
    return app


def monitoring_routes(served: ServedModel, response_counts: Counter) -> APIRouter:
    """GET /v1/models, /health and /metrics (Prometheus' text format: `name{labels} value`, one per line)."""
    routes = APIRouter()

    def model_card() -> dict:
        return {"id": served.name, "object": "model", "created": served.created, "owned_by": "regard"}

    @routes.get("/v1/models")
    async def models() -> dict:
        return {"object": "list", "data": [model_card()]}

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> dict:
        served.check_name(name)
        return model_card()

    @routes.get("/health")
    async def health() -> JSONResponse:
        if served.engine.alive:
            return JSONResponse({"status": "ok"})
        raise ApiError(503, "the engine has stopped; restart the server", code="unhealthy")

    @routes.get("/metrics")
    async def metrics() -> PlainTextResponse:
        engine = await served.engine.call(served.engine.engine.metrics)
        lines = [f"regard_engine_{name} {value:g}" for name, value in sorted(engine.items())]
        lines.append("# TYPE regard_http_answers_total counter")
        lines += [
            f'regard_http_answers_total{{route="{route}",status="{status}"}} {count}'
            for (route, status), count in sorted(response_counts.items())
        ]
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    return routes
