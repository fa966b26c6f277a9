"""GET /v1/models, /health, /ready and /metrics."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from fastapi import APIRouter
from starlette.responses import PlainTextResponse

from regard.engine.async_engine import EngineStopped
from regard.server.errors import ApiError
from regard.server.metrics import METRICS_TYPE, ModelMetrics, metrics_text
from regard.server.model_registry import ModelRegistry
from regard.server.response_bodies import ModelCard, ModelList, Status
from regard.server.served_model import ServedModel


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


def router(models: ModelRegistry, read_metrics: Callable[[], Awaitable[str]]) -> APIRouter:
    routes = APIRouter()

    def card(served: ServedModel) -> ModelCard:
        return ModelCard(
            id=served.name, object="model", created=served.created, owned_by="regard", parent=served.parent,
            max_model_len=served.context,
        )  # fmt: skip

    @routes.get("/v1/models")
    async def list_models() -> ModelList:
        served = [each for model in models for each in (model, *map(model.with_adapter, model.adapters))]
        return ModelList(object="list", data=[card(each) for each in served])

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
        return PlainTextResponse(await read_metrics(), media_type=METRICS_TYPE)

    return routes
