"""The /regard/models routes: models that are served and those at hand, loaded and removed while the server runs.

They also have the tables of plan and verify.

The server gets an object that finds and opens models (`Library`). Loading and verifying take long, so they run in
threads of their own, one at a time, and their state is read by later requests.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from fastapi import APIRouter

from regard.engine.async_engine import SHUTTING_DOWN
from regard.engine.memory import bytes_of
from regard.server.adapter_routes import FOLDERS
from regard.server.errors import ApiError, shutting_down
from regard.server.model_registry import ModelRegistry
from regard.server.model_schema import (
    LawTable,
    LoadModelBody,
    ModelsList,
    PlanBody,
    PlanChoices,
    PlanTable,
    ServedModelCard,
    UnloadModelBody,
    Verification,
    VerifyBody,
    Work,
)
from regard.server.response_bodies import Status
from regard.server.run_routes import check_allowed
from regard.server.served_model import ServedModel
from regard.server.worker_thread import WorkerThread, stop_all

log = logging.getLogger(__name__)
MAX_ADAPTERS = 1000  # that are listed
NO_MEMORY = "the memory does not suffice; unload a model first, or choose a smaller one"
OUT_OF_MEMORY = ("out of memory", "allocate memory")  # torch's RuntimeErrors


class Library(Protocol):
    """Models at hand, as the fields of the responses below. Methods raise LookupError for a model that is not listed,
    ValueError for what cannot be done."""

    def available(self, served: Collection[str]) -> list[dict[str, Any]]: ...

    def choices(self) -> dict[str, list[str]]: ...

    def find(self, model: str) -> object: ...

    def open(self, model: str, taken: Collection[str]) -> ServedModel: ...

    def plan(
        self, model: str, context: int | None, batch: int, dtype: str, weights: str | None, device: str | None
    ) -> dict[str, Any]: ...

    def verify(self, model: str, on_law: Callable[[str, str, int], None]) -> dict[str, Any]: ...


class Stopped(Exception):
    """Work that a client has stopped, or that ends because the server does."""


def router(models: ModelRegistry, library: Library | None, adapters: Path | None, may_manage: bool) -> APIRouter:
    """library: None: there are no such routes. adapters: the folder of adapters. may_manage: whether clients may load
    and remove models."""
    routes = APIRouter(prefix="/regard/models")
    if library is None:
        return routes
    thread, loading_thread, verify_thread = WorkerThread("models", 32), WorkerThread("loading"), WorkerThread("verify")

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncGenerator[None, None]:
        yield
        models.draining = True  # ends a verification with its next law
        await stop_all(thread, loading_thread, verify_thread)

    routes.lifespan_context = lifespan
    loading: Work | None = None
    verification = Verification(work=None, table=None)
    tasks: set[asyncio.Task] = set()
    stops = 0  # of verifications, ever

    def start_task(work: Any) -> None:
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def call(function: Callable, *args: Any) -> Any:
        with thread.request():
            try:
                return await thread.run(function, *args)
            except LookupError as error:
                raise ApiError(404, str(error.args[0]), code="model_not_found", param="model") from error
            except (ValueError, RuntimeError, OverflowError) as error:
                raise ApiError(400, public_text(error), code="invalid_value") from error

    @routes.get("")
    async def list_models() -> ModelsList:
        cards = [describe(model) for model in models]
        available = await call(library.available, [card.model for card in cards])
        return ModelsList(
            served=cards,
            available=[entry | {"problem": without_folders(entry["problem"] or "") or None} for entry in available],
            loading=loading,
            adapters=None if adapters is None else await call(adapter_names, adapters),
            choices=PlanChoices(**await call(library.choices)),
            may_load=may_manage,
        )

    @routes.post("/load")
    async def load(body: LoadModelBody) -> Status:
        nonlocal loading
        check_allowed(may_manage)
        await call(library.find, body.model)
        if models.draining:
            raise shutting_down(SHUTTING_DOWN)
        if loading is not None and loading.state == "running":
            raise ApiError(409, f"{loading.model} is being loaded; wait for it", code="busy", param="model")
        loading = work = Work(model=body.model, state="running")

        async def run() -> None:
            with failures(work):
                served = await loading_thread.run(library.open, body.model, models.names)
                if models.draining:
                    raise Stopped(SHUTTING_DOWN)
                models.add(served)
                work.name = served.name
                work.state = "done"

        start_task(run())
        return Status(status="ok")

    @routes.post("/unload")
    async def unload(body: UnloadModelBody) -> Status:
        check_allowed(may_manage)
        await models.remove(body.model)
        return Status(status="ok")

    @routes.post("/plan")
    async def plan(body: PlanBody) -> PlanTable:
        table = await call(
            library.plan, body.model, body.context, body.batch, body.dtype, body.weights, body.device or None
        )
        return PlanTable(**table)

    @routes.get("/verify")
    async def verified() -> Verification:
        return verification

    @routes.post("/verify")
    async def verify(body: VerifyBody) -> Status:
        nonlocal verification
        check_allowed(may_manage)
        if verification.work is not None and verification.work.state == "running":
            raise ApiError(409, f"{verification.work.model} is being verified; wait for it, or stop it", code="busy")
        work, started = Work(model=body.model, state="running"), stops
        verification = current = Verification(work=work, table=None)

        def on_law(law: str, dtype: str, total: int) -> None:
            if models.draining or stops != started:
                raise Stopped("it was stopped")
            work.done, work.total, work.now = work.done + (work.total is not None), total, f"{law} ({dtype})"

        async def run() -> None:
            with failures(work):
                current.table = LawTable(**await verify_thread.run(library.verify, body.model, on_law))
                work.done, work.state = work.total or 0, "done"

        start_task(run())
        return Status(status="ok")

    @routes.post("/verify/stop")
    async def stop_verifying() -> Status:
        nonlocal stops
        check_allowed(may_manage)
        stops += 1
        return Status(status="ok")

    return routes


@contextmanager
def failures(work: Work) -> Generator[None]:
    """Record why work fails."""
    try:
        yield
    except (ApiError, ValueError, LookupError, OSError, Stopped) as error:
        work.error, work.state = public_text(error), "failed"
    except Exception as error:
        if isinstance(error, MemoryError) or any(text in str(error) for text in OUT_OF_MEMORY):
            work.error, work.state = NO_MEMORY, "failed"
        else:
            log.exception("%s: loading or verifying failed", work.model)
            work.error, work.state = "it failed; the server's log has the details", "failed"


def public_text(error: Exception) -> str:
    """The message of an error without the folders of files: clients do not learn where they are."""
    return without_folders(str(error.args[0] if isinstance(error, LookupError) and error.args else error))


def without_folders(text: str) -> str:
    return FOLDERS.sub("", text)


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
    """The folders and runs with adapters, by their names in the server's folder of adapters."""
    found = [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.is_symlink()]
    names = [path.name for path in found if (path / "adapter_config.json").is_file() or (path / "checkpoints").is_dir()]
    return names[:MAX_ADAPTERS]
