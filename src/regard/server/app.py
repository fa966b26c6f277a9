"""The FastAPI application: middleware, routes, and the web page at `/`."""

from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from fastapi import FastAPI
from fastapi.middleware import Middleware
from fastapi.telemetry import TelemetryConfig
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import FileResponse
from starlette.staticfiles import StaticFiles

from regard.server import (
    adapter_routes,
    attention_routes,
    chat,
    completions,
    errors,
    inside_routes,
    inspection,
    instrument_routes,
    model_routes,
    monitoring,
    responses_api,
    run_routes,
    text_encoder,
    tokenization,
    transcriptions,
)
from regard.server.grounding import Grounding
from regard.server.middleware import (
    AccessLog,
    BodyLimit,
    HostCheck,
    KeyCheck,
    ResponseCounter,
    SecurityHeaders,
)
from regard.server.model_registry import ModelRegistry
from regard.server.model_work import Library
from regard.server.network_options import LOCAL, MEDIA_BODY, TEXT_BODY, NetworkOptions
from regard.server.request_id import HEADER, RequestId
from regard.server.served_model import ServedModel
from regard.server.tracing import Traces, has_opentelemetry

WEB = Path(__file__).parent.parent / "web"
# tracing.py makes the spans. FastAPI's own would double them, and its records of invalid bodies quote prompts.
NO_TELEMETRY: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False, "operation_spans": False}


def create_app(
    models: Sequence[ServedModel],
    network: NetworkOptions = LOCAL,
    *,
    adapters: Path | None = None,
    runs: run_routes.Runs | None = None,
    library: Library | None = None,
    grounding: Grounding | None = None,
) -> FastAPI:
    """The page shows the first of the models until another is chosen. `adapters` is a folder from which clients may
    load adapters; None: they may not. `runs` is a folder of training runs, `library` the models that can
    be loaded while the server runs. `grounding` are the documents that chats are answered from.
    """
    registry, responses = ModelRegistry(models), Counter()
    reads_media = any(model.images is not None or model.speech is not None for model in models)
    max_body = network.max_body or (MEDIA_BODY if reads_media else TEXT_BODY)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        await registry.start()
        yield
        await registry.stop()

    middleware = [
        Middleware(RequestId),
        *([Middleware(Traces)] if has_opentelemetry() else []),
        Middleware(ResponseCounter, counts=responses),
        *guards(network, max_body),
    ]
    app = FastAPI(
        title="regard",
        middleware=middleware,
        lifespan=lifespan,
        responses={"4XX": {"model": errors.ErrorBody}, "5XX": {"model": errors.ErrorBody}},
        docs_url=None,  # FastAPI's documentation pages load scripts from other hosts
        redoc_url=None,
        telemetry=NO_TELEMETRY,
    )
    app.state.models, app.state.max_body = registry, max_body
    errors.install_handlers(app)
    app.state.metrics = partial(monitoring.current_metrics, registry, responses)
    app.include_router(monitoring.router(registry, app.state.metrics))
    for routes in (
        completions,
        responses_api,
        text_encoder,
        transcriptions,
        tokenization,
        inspection,
        inside_routes,
        attention_routes,
    ):
        app.include_router(routes.router(registry))
    app.include_router(chat.router(registry, grounding))
    app.include_router(instrument_routes.router(registry, runs))
    app.include_router(adapter_routes.router(registry, adapters))
    app.include_router(run_routes.router(runs, network.may_manage))
    app.include_router(model_routes.router(registry, library, adapters, network.may_manage))

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(WEB / "index.html")

    app.mount("/web", StaticFiles(directory=WEB))
    return app


def guards(network: NetworkOptions, max_body: int) -> list[Middleware]:
    """The middleware that logs and checks requests, outermost first. max_body: bytes of a request."""
    return [
        *([Middleware(AccessLog)] if network.access_log else []),
        Middleware(SecurityHeaders),
        Middleware(HostCheck, hosts=network.host_names, origins=network.allow_origins),
        *([cross_origin(network.allow_origins)] if network.allow_origins else []),
        Middleware(KeyCheck, keys=network.keys),
        Middleware(BodyLimit, max_body=max_body),
    ]


def cross_origin(origins: tuple[str, ...]) -> Middleware:
    """Answers the preflight requests of browsers, which have no key, and names the origin in responses."""
    return Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["retry-after", HEADER],
    )
