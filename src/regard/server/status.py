"""GET /v1/models, /health and /metrics (Prometheus text: `name{labels} value`, one per line)."""

from collections import Counter

from fastapi import APIRouter
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from regard.server.errors import ApiError
from regard.server.service import Service


class Answers:
    """Middleware that counts answers by route and status; a path that no route has counts as `other`."""

    def __init__(self, app: ASGIApp, counts: Counter):
        self.app, self.counts = app, counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.counts[getattr(scope.get("route"), "path", "other"), message["status"]] += 1
            await send(message)

        await self.app(scope, receive, counting)


def router(service: Service, counts: Counter) -> APIRouter:
    routes = APIRouter()

    def card() -> dict:
        return {"id": service.name, "object": "model", "created": service.created, "owned_by": "regard"}

    @routes.get("/v1/models")
    async def models() -> dict:
        return {"object": "list", "data": [card()]}

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> dict:
        service.check_model(name)
        return card()

    @routes.get("/health")
    async def health() -> JSONResponse:
        if service.worker.alive:
            return JSONResponse({"status": "ok"})
        raise ApiError(503, "the engine has stopped", code="unhealthy")

    @routes.get("/metrics")
    async def metrics() -> PlainTextResponse:
        engine = await service.worker.run(service.worker.engine.metrics)
        lines = [f"regard_engine_{name} {value:g}" for name, value in sorted(engine.items())]
        lines.append("# TYPE regard_http_answers_total counter")
        lines += [f'regard_http_answers_total{{route="{r}",status="{s}"}} {n}' for (r, s), n in sorted(counts.items())]
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    return routes
