"""The FastAPI application: middleware, routes, monitoring, and the web page at `/`."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from fastapi import APIRouter, FastAPI
from fastapi.middleware import Middleware
from fastapi.telemetry import TelemetryConfig
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import FileResponse, PlainTextResponse
from starlette.staticfiles import StaticFiles

from regard.engine.async_engine import EngineStopped
from regard.server import (
    adapter_routes,
    chat,
    completions,
    errors,
    inspection,
    responses_api,
    text_encoder,
    tokenization,
    transcriptions,
)
from regard.server.errors import ApiError
from regard.server.metrics import METRICS_TYPE, ModelMetrics, metrics_text
from regard.server.middleware import (
    AccessLog,
    BodyLimit,
    HostCheck,
    KeyCheck,
    ResponseCounter,
    SecurityHeaders,
)
from regard.server.model_registry import ModelRegistry
from regard.server.network_options import LOCAL, MEDIA_BODY, TEXT_BODY, NetworkOptions
from regard.server.request_id import HEADER, RequestId
from regard.server.response_schema import ModelCard, ModelList, Status
from regard.server.served_model import ServedModel
from regard.server.tracing import Traces, has_opentelemetry

WEB = Path(__file__).parent.parent / "web"
# tracing.py makes the spans. FastAPI's own would double them, and its records of invalid bodies quote prompts.
NO_TELEMETRY: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False, "operation_spans": False}


def create_app(
    models: Sequence[ServedModel], network: NetworkOptions = LOCAL, *, adapters: Path | None = None
) -> FastAPI:
    """The first of the models is the one that the page and the /regard routes use unless they name another.
    `adapters` is a folder from which clients may load adapters; None: they may not.
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
    app.state.metrics = partial(current_metrics, registry, responses)
    app.include_router(monitoring_routes(registry, app.state.metrics))
    for routes in (completions, chat, responses_api, text_encoder, transcriptions, tokenization, inspection):
        app.include_router(routes.router(registry))
    app.include_router(adapter_routes.router(registry, adapters))

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
    exposed = ["retry-after", HEADER]
    return Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=exposed,
    )


async def current_metrics(models: ModelRegistry, responses: Mapping[tuple[str, int], int]) -> str:
    """In Prometheus' format. `responses`: their numbers by route and status."""

    async def metrics_of(served: ServedModel) -> ModelMetrics:
        engine, found = served.engine, {}
        if engine is not None:
            try:
                found = await engine.call(engine.engine.metrics)
            except EngineStopped:
                found = None
        return ModelMetrics(served.name, found, served.metrics)

    return metrics_text(await asyncio.gather(*(metrics_of(served) for served in models)), responses)


def monitoring_routes(models: ModelRegistry, current_metrics: Callable[[], Awaitable[str]]) -> APIRouter:
    """GET /v1/models, /health, /ready and /metrics."""
    routes = APIRouter()

    def card(served: ServedModel) -> ModelCard:
        parent = next((model.name for model in models if served.adapter in model.adapters), None)
        return ModelCard(id=served.name, object="model", created=served.created, owned_by="regard", parent=parent)

    @routes.get("/v1/models")
    async def list_models() -> ModelList:
        return ModelList(object="list", data=[card(models.find(name)) for name in models.names])

    @routes.get("/v1/models/{name:path}")
    async def describe_model(name: str) -> ModelCard:
        return card(models.find(name))

    @routes.get("/health")
    async def health() -> Status:
        """Whether the engines of all models work; if not, restart the process."""
        if stopped := models.stopped:
            message = f"the engine of {', '.join(stopped)} has stopped; restart the server"
            raise ApiError(503, message, code="unhealthy")
        return Status(status="ok")

    @routes.get("/ready")
    async def ready() -> Status:
        """Whether the models are loaded and the server accepts requests; if not, send them to another one."""
        if models.stopped or models.draining:
            raise ApiError(503, "the server is shutting down; use another one", code="not_ready")
        return Status(status="ok")

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(await current_metrics(), media_type=METRICS_TYPE)

    return routes
