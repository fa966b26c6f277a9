"""The models of a server by their names. An adapter is named like a model.

Each model has its own engine in its own thread, so a model that fails, or takes long, does not affect the others.
Models can be added and removed while the server runs; the last one stays.
"""

import asyncio
import difflib
import gc
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from regard.server.errors import ApiError
from regard.server.served_model import ServedModel

DRAIN = 30.0  # seconds in which the requests of a removed model may finish
REMOVED = "the model was removed from the server; use another one"


class RequestWithModel(Protocol):
    model: str | None


class ModelRegistry:
    """`find(name)` is the model that a request names. If there is only one model, the name may be missing."""

    def __init__(self, models: Sequence[ServedModel]):
        if not models:
            raise ValueError("a server needs at least one model")
        self._models: dict[str, ServedModel] = {}
        for model in models:
            if model.name in self._models:
                raise ValueError(f"two models have the name {model.name!r}; give them different names")
            self._models[model.name] = model
        self._leaving: list[ServedModel] = []  # removed, with unfinished requests
        self.draining = False  # the server is shutting down and accepts no new connections

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(tuple(self._models.values()))  # a copy: models may be added between two of its items

    @property
    def names(self) -> list[str]:
        """The names of models and of their adapters."""
        return [name for model in self for name in (model.name, *model.adapters)]

    @property
    def default(self) -> ServedModel:
        """The first model, which the page shows until another is chosen."""
        return next(iter(self))

    @property
    def stopped(self) -> list[str]:
        """The names of the models whose engine has ended."""
        return [model.name for model in self if not model.alive]

    def find(self, name: str | None) -> ServedModel:
        """The model of this name; 404 if there is none. None: the only model, without an adapter; 400 if there are
        several."""
        if name is None:
            if len(self._models) > 1:
                message = f"model is missing, and this server has several; send {' or '.join(map(repr, self._models))}"
                raise ApiError(400, message, code="model_required", param="model")
            return self.default
        if name in self._models:
            return self._models[name]
        for model in self:
            if name in model.adapters:
                return model.with_adapter(name)
        close = difflib.get_close_matches(name[:200], self.names, n=1)  # the time grows with the length of the name
        hint = f"; did you mean {close[0]!r}?" if close and len(self.names) > 1 else ""
        message = f"there is no model {name[:100]!r} on this server{hint}; use {' or '.join(map(repr, self.names))}"
        raise ApiError(404, message, code="model_not_found", param="model")

    def find_for(self, request: RequestWithModel) -> ServedModel:
        """The model of a request, as `find` finds it. A missing name is filled in, for traces."""
        served = self.find(request.model)
        request.model = served.name
        return served

    def add(self, model: ServedModel) -> None:
        """Start a model; 409 if its name is taken."""
        if model.name in self.names:
            message = f"the name {model.name!r:.100} is taken; choose another name, or unload that model first"
            raise ApiError(409, message, code="model_exists", param="model")
        model.start()
        self._models[model.name] = model

    async def remove(self, name: str, drain: float = DRAIN) -> None:
        """Accept no more requests for a model, let the others finish for `drain` seconds, and free its memory.

        404 if there is no such model, 409 if it is the only one.
        """
        model = self.find(name)
        if model.adapter is not None:
            message = f"{name!r:.100} is an adapter; unload it with /v1/unload_lora_adapter"
            raise ApiError(400, message, code="invalid_value", param="model")
        if len(self._models) == 1:
            message = f"{name!r:.100} is the only model of this server; load another one first"
            raise ApiError(409, message, code="last_model", param="model")
        self._leaving.append(self._models.pop(name))
        deadline = time.monotonic() + drain
        # Polled: the requests of a model run in several threads and in its engine, and none of these signals its end.
        while model.busy and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        if model.engine is not None:
            model.engine.cancel_all(REMOVED)
        await model.stop()
        self._leaving.remove(model)
        del model
        await asyncio.to_thread(collect_garbage)

    async def start(self) -> None:
        for model in self:
            model.start()

    async def stop(self) -> None:
        """End the threads of all models; their unfinished requests fail."""
        await asyncio.gather(*(model.stop() for model in (*self, *self._leaving)))

    def cancel_all(self, reason: str) -> None:
        for model in (*self, *self._leaving):
            if model.engine is not None:
                model.engine.cancel_all(reason)


def collect_garbage() -> None:
    """Free a removed model. At the start of the server all objects are frozen (run_server.py), those of models too."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
