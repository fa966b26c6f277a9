"""The FastAPI application: middleware, routes, and the web page at `/`."""

import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI
from fastapi.middleware import Middleware
from starlette.responses import FileResponse
from starlette.staticfiles import StaticFiles

from regard.engine.engine import Engine
from regard.server import chat, completions, errors, inspection, monitoring
from regard.server.async_engine import AsyncEngine
from regard.server.middleware import (
    LOCAL_HOSTS,
    MAX_BODY,
    BodyLimit,
    HostCheck,
    KeyCheck,
    ResponseCounter,
    SecurityHeaders,
)
from regard.server.served_model import Lens, ServedModel
from regard.text.tokenizer import Tokenizer

WEB = Path(__file__).parent.parent / "web"


def create_app(
    engine: Engine,
    tokenizer: Tokenizer,
    name: str,
    *,
    key: str | None = None,
    lens: Lens | None = None,
    hosts: tuple[str, ...] = LOCAL_HOSTS,
    max_body: int = MAX_BODY,
) -> FastAPI:
    """`hosts` are the names by which the server may be addressed. An empty tuple allows all and requires a key."""
    if not hosts and key is None:
        raise ValueError("hosts=() lets any site call the server; set a key or name the hosts")
    served = ServedModel(name, int(time.time()), AsyncEngine(engine), tokenizer, lens)
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
    app.include_router(monitoring.router(served, response_counts))
    for routes in (completions, chat, inspection):
        app.include_router(routes.router(served))

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(WEB / "index.html")

    app.mount("/web", StaticFiles(directory=WEB))
    return app
