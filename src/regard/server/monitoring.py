"""GET /v1/models, /health and /metrics (in Prometheus' text format: `name{labels} value`, one per line)."""

from collections import Counter

from fastapi import APIRouter
from starlette.responses import JSONResponse, PlainTextResponse

from regard.server.errors import ApiError
from regard.server.served_model import ServedModel


def router(served: ServedModel, response_counts: Counter) -> APIRouter:
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
