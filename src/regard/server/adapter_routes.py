"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: adapters while the server runs, as in vLLM.

They exist only if the server has a folder of adapters. A path is one inside this folder: neither `..` nor a symbolic
link leads out of it. A loaded adapter is named like a model in later requests.
"""

import asyncio
import re
from pathlib import Path

from fastapi import APIRouter
from pydantic import Field

from regard.server.errors import ApiError
from regard.server.model_registry import ModelRegistry
from regard.server.response_bodies import Status
from regard.server.schema import RequestBody
from regard.server.served_model import ServedModel

FOLDERS = re.compile(r"(?<![\w.])/(?:[^/\s:;,'\"]+/)+")  # of an absolute path in a message


class LoadAdapterBody(RequestBody):
    lora_name: str = Field(min_length=1, max_length=256)
    lora_path: str = Field(min_length=1, max_length=1024)
    model: str | None = Field(default=None, max_length=256, description="The adapter's model, if there are several.")


class UnloadAdapterBody(RequestBody):
    lora_name: str = Field(min_length=1, max_length=256)


def router(models: ModelRegistry, folder: Path | None) -> APIRouter:
    """folder: the adapters that may be loaded; None: there are no such routes."""
    routes = APIRouter()
    if folder is None:
        return routes
    root, lock = folder.resolve(), asyncio.Lock()

    @routes.post("/v1/load_lora_adapter")
    async def load_lora_adapter(body: LoadAdapterBody) -> Status:
        served = models.find_for(body)
        if served.adapter is not None:
            raise ApiError(
                400, f"{served.name!r:.100} is an adapter; name its model", code="invalid_value", param="model"
            )
        path = await asyncio.to_thread(find_adapter, root, body.lora_path)
        async with lock:  # two requests cannot load the same name
            if body.lora_name in models.names:
                message = f"the name {body.lora_name!r:.100} is taken; unload the adapter first, or choose another name"
                raise ApiError(400, message, code="adapter_exists", param="lora_name")
            await load_adapter(served, body.lora_name, path)
        return Status(status="ok")

    @routes.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(body: UnloadAdapterBody) -> Status:
        engine = next((model.engine for model in models if body.lora_name in model.adapters), None)
        if engine is None:
            message = f"there is no adapter {body.lora_name!r:.100} on this server; GET /v1/models lists them"
            raise ApiError(404, message, code="adapter_not_found", param="lora_name")
        try:
            await engine.call(engine.engine.unload_adapter, body.lora_name)
        except ValueError as error:  # another request has unloaded it
            raise ApiError(404, str(error), code="adapter_not_found", param="lora_name") from error
        return Status(status="ok")

    return routes


async def load_adapter(served: ServedModel, name: str, path: Path) -> None:
    """Read the files in a thread, then load the adapter between two steps of the engine."""
    engine, read = served.engine, served.read_adapter
    if engine is None or read is None:
        message = f"{served.name} cannot load adapters"
        raise ApiError(400, message, code="adapters_not_supported", param="model")
    try:
        weights = await asyncio.to_thread(read, path)
        await engine.call(engine.engine.load_adapter, name, weights)
    except (ValueError, OSError) as error:
        message = FOLDERS.sub("", str(error))  # clients do not learn where files are
        raise ApiError(400, message, code="invalid_adapter", param="lora_path") from error


def find_adapter(root: Path, name: str) -> Path:
    """The folder of an adapter inside `root`; 400 if it is not there."""
    try:
        path = (root / name).resolve()
        exists = path.is_relative_to(root) and path.is_dir()
        links = [entry for entry in path.rglob("*") if entry.is_symlink()] if exists else []  # also of checkpoints
        exists = exists and all(link.resolve().is_relative_to(root) for link in links)
    except (OSError, ValueError, RuntimeError):  # a name with a null byte, or too long; a symlink loop
        exists = False
    if not exists:
        message = f"there is no adapter folder {name!r:.100} in the server's folder of adapters; give a path inside it"
        raise ApiError(400, message, code="adapter_not_found", param="lora_path")
    return path
