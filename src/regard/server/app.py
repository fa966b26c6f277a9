"""The application: limits around, routes inside, the page at `/`."""

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
from regard.server import chat, completions, errors, look, status
from regard.server.limits import LOCAL_HOSTS, MAX_BODY, BodyCap, HostCheck, KeyCheck, SecurityHeaders
from regard.server.service import Lens, Service
from regard.server.worker import Worker
from regard.text.tokenizer import Tokenizer

PAGE = Path(__file__).parent.parent / "web"


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
    """`hosts` are the names under which the server may be addressed; empty allows any, which needs a key."""
    if not hosts and key is None:
        raise ValueError("hosts=() lets any site reach the server; set a key or name the hosts")
    service = Service(name, int(time.time()), Worker(engine), tokenizer, lens)
    counts: Counter = Counter()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        await service.start()
        yield
        await service.stop()

    limits = [
        Middleware(status.Answers, counts=counts),
        Middleware(SecurityHeaders),
        Middleware(HostCheck, hosts=hosts),
        Middleware(KeyCheck, key=key),
        Middleware(BodyCap, max_body=max_body),
    ]
    app = FastAPI(
        title="regard",
        middleware=limits,
        lifespan=lifespan,
        responses={"4XX": {"model": errors.ErrorBody}, "5XX": {"model": errors.ErrorBody}},
        docs_url=None,  # the documentation pages would load scripts from other hosts
        redoc_url=None,
    )
    app.state.service = service
    errors.install(app)
    for routes in (
        status.router(service, counts),
        completions.router(service),
        chat.router(service),
        look.router(service),
    ):
        app.include_router(routes)

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE / "index.html")

    app.mount("/web", StaticFiles(directory=PAGE))
    return app
