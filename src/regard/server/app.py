"""The FastAPI application: middleware, routes, monitoring, and the web page at `/`."""

import re
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import APIRouter, FastAPI
from fastapi.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import FileResponse, PlainTextResponse
from starlette.staticfiles import StaticFiles

from regard.engine.async_engine import AsyncEngine, Submit
from regard.engine.engine import Engine
from regard.server import chat, completions, errors, inspection, responses_api, text_encoder, tokenization
from regard.server.errors import ApiError
from regard.server.lens_thread import Lens, LensThread
from regard.server.middleware import (
    LOCAL_HOSTS,
    MAX_BODY,
    AccessLog,
    BodyLimit,
    HostCheck,
    KeyCheck,
    ResponseCounter,
    SecurityHeaders,
)
from regard.server.response_schema import ModelCard, ModelList, Status
from regard.server.served_model import ServedModel
from regard.server.text_encoder import TextEncoder
from regard.text.tokenizer import Tokenizer

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+")
WEB = Path(__file__).parent.parent / "web"


def create_app(
    engine: Engine | None,
    tokenizer: Tokenizer,
    name: str,
    *,
    key: str | None = None,
    lens: Lens | None = None,
    encoder: TextEncoder | None = None,
    submit_source: Submit | None = None,
    allow_hosts: tuple[str, ...] = LOCAL_HOSTS,
    allow_origins: tuple[str, ...] = (),
    access_log: bool = False,
    max_body: int = MAX_BODY,
) -> FastAPI:
    """`allow_hosts` are the host names that the server accepts. An empty tuple accepts all names and requires a key.
    `allow_origins` are the origins, such as "https://app.example", whose pages may call the server besides its own
    page; "*" allows all and requires a key. `access_log` logs every request to the logger `regard.access`.

    `engine` is None for a model that only encodes texts. `encoder` is for embeddings and ranking.
    `submit_source` submits a prompt as the source of an encoder-decoder; None: a decoder continues the prompt.
    """
    if not allow_hosts and key is None:
        raise ValueError("allow_hosts=() lets any site call the server; set a key or name the hosts")
    if "*" in allow_origins and key is None:
        raise ValueError("allow_origins=('*',) lets any site call the server; set a key or name the origins")
    for origin in allow_origins:
        if origin != "*" and not ORIGIN.fullmatch(origin):
            raise ValueError(f"the origin {origin!r} must be a scheme and a host, such as https://app.example:8080")
    served = ServedModel(
        name,
        int(time.time()),
        None if engine is None else AsyncEngine(engine, submit_source),
        tokenizer,
        None if lens is None else LensThread(lens),
        prompt_is_source=submit_source is not None,
    )
    if encoder is not None and encoder.context is not None:
        served.context = encoder.context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        await served.start()
        yield
        await served.stop()

    middleware = [
        Middleware(ResponseCounter, counts=served.metrics.responses),
        *([Middleware(AccessLog)] if access_log else []),
        Middleware(SecurityHeaders),
        Middleware(HostCheck, hosts=allow_hosts, origins=allow_origins),
        *([cross_origin(allow_origins)] if allow_origins else []),
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
    app.include_router(monitoring_routes(served))
    for routes in (completions, chat, responses_api, tokenization, inspection):
        app.include_router(routes.router(served))
    app.include_router(text_encoder.router(served, encoder))

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(WEB / "index.html")

    app.mount("/web", StaticFiles(directory=WEB))
    return app


def cross_origin(origins: tuple[str, ...]) -> Middleware:
    """Answers the preflight requests of browsers, which have no key, and names the origin in responses."""
    exposed = ["retry-after"]
    return Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=exposed,
    )


def monitoring_routes(served: ServedModel) -> APIRouter:
    """GET /v1/models, /health, /ready and /metrics."""
    routes = APIRouter()

    def model_card() -> dict:
        return {"id": served.name, "object": "model", "created": served.created, "owned_by": "regard"}

    @routes.get("/v1/models")
    async def models() -> ModelList:
        return ModelList.model_validate({"object": "list", "data": [model_card()]})

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> ModelCard:
        served.check_name(name)
        return ModelCard.model_validate(model_card())

    @routes.get("/health")
    async def health() -> Status:
        """Whether the process works; if not, restart it."""
        if served.alive:
            return Status(status="ok")
        raise ApiError(503, "the engine has stopped; restart the server", code="unhealthy")

    @routes.get("/ready")
    async def ready() -> Status:
        """Whether the model is loaded and the server accepts requests; if not, send them to another one."""
        if served.alive and not served.draining:
            return Status(status="ok")
        raise ApiError(503, "the server is shutting down; use another one", code="not_ready")

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        engine = {} if served.engine is None else await served.engine.call(served.engine.engine.metrics)
        return PlainTextResponse(served.metrics.text(engine), media_type="text/plain; version=0.0.4")

    return routes
