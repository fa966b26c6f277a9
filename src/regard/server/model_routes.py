"""The /regard/models routes: list the served and the stored models, load and remove them, plan and verify them.

The server gets an object that finds and opens models (`Library`). For the long work see model_work.py.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import APIRouter

from regard.engine.memory import bytes_of
from regard.server.errors import ApiError
from regard.server.model_registry import ModelRegistry
from regard.server.model_schema import (
    LoadModelBody,
    ModelsList,
    PlanBody,
    PlanChoices,
    PlanTable,
    ServedModelCard,
    UnloadModelBody,
    Verification,
    VerifyBody,
)
from regard.server.model_work import Library, ModelLoader, ModelVerifier, public_text, without_folders
from regard.server.response_bodies import Status
from regard.server.run_routes import check_allowed
from regard.server.served_model import ServedModel
from regard.server.worker_thread import WorkerThread, stop_all

MAX_ADAPTERS = 1000  # that are listed


def router(models: ModelRegistry, library: Library | None, adapters: Path | None, may_manage: bool) -> APIRouter:
    """library: None: there are no such routes. adapters: the folder of adapters. may_manage: whether clients may load
    and remove models."""
    routes = APIRouter(prefix="/regard/models")
    if library is None:
        return routes
    thread, loader, verifier = WorkerThread("models", 32), ModelLoader(models, library), ModelVerifier(models, library)

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncGenerator[None, None]:
        yield
        models.draining = True  # ends a verification with its next law
        await stop_all(thread, loader.thread, verifier.thread)

    routes.lifespan_context = lifespan

    @routes.get("")
    async def list_models() -> ModelsList:
        cards = [describe(model) for model in models]
        available = await call(thread, library.available, [card.model for card in cards])
        return ModelsList(
            served=cards,
            available=[entry | {"problem": without_folders(entry["problem"] or "") or None} for entry in available],
            loading=loader.work,
            adapters=None if adapters is None else await call(thread, adapter_names, adapters),
            choices=PlanChoices(**await call(thread, library.choices)),
            may_load=may_manage,
        )

    @routes.post("/plan")
    async def plan(body: PlanBody) -> PlanTable:
        device = body.device or None
        options = body.model, body.context, body.batch, body.dtype, body.weights, device
        return PlanTable(**await call(thread, library.plan, *options))

    @routes.post("/load")
    async def load(body: LoadModelBody) -> Status:
        check_allowed(may_manage)
        await call(thread, library.find, body.model)
        loader.start(body.model)
        return Status(status="ok")

    @routes.post("/unload")
    async def unload(body: UnloadModelBody) -> Status:
        check_allowed(may_manage)
        await models.remove(body.model)
        return Status(status="ok")

    add_verification(routes, verifier, may_manage)
    return routes


def add_verification(routes: APIRouter, verifier: ModelVerifier, may_manage: bool) -> None:
    @routes.get("/verify")
    async def verified() -> Verification:
        return verifier.current

    @routes.post("/verify")
    async def verify(body: VerifyBody) -> Status:
        check_allowed(may_manage)
        verifier.start(body.model)
        return Status(status="ok")

    @routes.post("/verify/stop")
    async def stop_verifying() -> Status:
        check_allowed(may_manage)
        verifier.stop()
        return Status(status="ok")


async def call(thread: WorkerThread, function: Callable, *args: Any) -> Any:
    """The result of a function of the library: 404 for a model that is not listed, 400 for what cannot be done."""
    with thread.request():
        try:
            return await thread.run(function, *args)
        except LookupError as error:
            raise ApiError(404, str(error.args[0]), code="model_not_found", param="model") from error
        except (ValueError, RuntimeError, OverflowError) as error:
            raise ApiError(400, public_text(error), code="invalid_value") from error


def describe(served: ServedModel) -> ServedModelCard:
    module = None if served.inspected is None else served.inspected.module
    engine = None if served.engine is None else served.engine.engine
    tensors = [] if module is None else [*module.parameters(), *module.buffers()]
    store = getattr(engine, "store", None)
    weight = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
    return ServedModelCard(
        model=served.name,
        does=purpose(served),
        parameters=None if module is None else sum(tensor.numel() for tensor in module.parameters()),
        bytes=sum(tensor.nbytes for tensor in tensors) or None,
        cache_bytes=None if store is None else bytes_of(store),
        context=served.context,
        dtype=None if weight is None else str(weight.dtype).removeprefix("torch."),
        device=None if weight is None else str(weight.device),
        rows=None if store is None else store.rows,
        adapters=list(served.adapters),
        loads_adapters=served.read_adapter is not None,
        busy=served.busy,
    )


def purpose(served: ServedModel) -> str:
    if served.speech is not None:
        return "speech to text"
    if served.engine is None:
        return "ranking" if served.encoder is not None and served.encoder.embed is None else "embeddings"
    if served.prompt_is_source:
        return "text to text"
    return "chat with images" if served.images is not None else "chat" if served.chats else "completion"


def adapter_names(folder: Path) -> list[str]:
    """The folders and runs with adapters, by their names in the server's folder of adapters.

    Names that are not UTF-8 or have control characters are left out. The folder may have been removed meanwhile.
    """
    if not folder.is_dir():
        return []
    found = [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.is_symlink()]
    found = [path for path in found if path.name.isprintable()]
    names = [path.name for path in found if (path / "adapter_config.json").is_file() or (path / "checkpoints").is_dir()]
    return names[:MAX_ADAPTERS]
