"""The LoRA adapters of an engine: loaded and unloaded while it runs, and mixed in one batch.

The matrices of all loaded adapters are on the host. A forward needs those of its requests in adapter slots on the
device (adapt/many_lora.py); it overwrites the least recently used ones, first those that no running request needs. A
request keeps its adapter until it ends, even if the adapter is unloaded meanwhile, or another one is loaded under its
name. A batch in which no request has an adapter runs the model itself, so it is computed as without adapters.
"""

import warnings
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from regard.adapt.lora_weights import LayerMatrices, LoraWeights, read_lora
from regard.adapt.many_lora import AdaptedModel, AdapterRows
from regard.adapt.targets import AdapterError
from regard.engine.decode_graphs import DecodeGraphs
from regard.engine.inputs import decoder_of
from regard.engine.request import Adapter, Request
from regard.engine.runner import Runner
from regard.engine.scheduler import ScheduledBatch
from regard.families import weight_table
from regard.models.encoder_decoder import EncoderDecoderModule
from regard.models.interleaved import InterleavedModule
from regard.spec import suggest_name

MAX_NAME = 256  # characters
MAX_RANK = 512  # every slot has space for the largest rank


class Adapters:
    def __init__(self, model: nn.Module, base: Runner, max_loras: int, max_cpu_loras: int, compile: bool):
        """max_loras: adapter slots, for the requests of one batch. max_cpu_loras: adapters that may be loaded."""
        self.model, self.base, self.compile = model, base, compile
        self.max_loras, self.max_cpu_loras = max_loras, max_cpu_loras
        self.loaded: dict[str, Adapter] = {}
        self.slot_of: dict[Adapter, int] = {}  # the least recently used first
        self.versions = count(1)
        self.adapted: AdaptedModel | None = None
        self.runner: Runner | None = None  # of the adapted model
        self.has_warned = False  # that this runner is slow

    def load(self, name: str, weights: LoraWeights) -> None:
        """Raises AdapterError if the adapter does not fit the model, or the limit is reached.

        After this or any other error, such as too little memory, the loaded adapters are as before.
        """
        self.check_new(name, weights)
        adapted = self.adapted or self.copy_model()
        adapted.check(weights)
        weights = on_host(weights)
        undo = adapted.prepare(weights)
        if undo is not None or self.runner is None:
            try:
                self.runner, self.has_warned = self.open_runner(adapted), False
            except BaseException:
                if undo is not None:
                    undo()
                raise
        self.adapted = adapted
        self.loaded[name] = Adapter(name, weights, next(self.versions))

    def check_new(self, name: str, weights: LoraWeights) -> None:
        """Raise AdapterError if the engine can load no adapter of this name and rank."""
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise AdapterError(f"{name!r:.80} is not a name for an adapter; use 1 to {MAX_NAME} printable characters")
        if self.max_cpu_loras == 0:
            raise AdapterError("this engine loads no adapters (max_cpu_loras=0); load the model with it (--adapter)")
        if self.base.batch_invariant:
            raise AdapterError("batch_invariant does not support adapters beside the model; load it merged with one")
        if name in self.loaded:
            raise AdapterError(f"an adapter named {name!r} is loaded already; unload it first, or choose another name")
        if len(self.loaded) >= self.max_cpu_loras:
            raise AdapterError(
                f"{self.max_cpu_loras} adapters are loaded, the most allowed (max_cpu_loras); unload one first"
            )
        if weights.rank > MAX_RANK:
            raise AdapterError(f"the adapter has rank {weights.rank}, and at most {MAX_RANK} can be mixed; merge it")

    def open_runner(self, adapted: AdaptedModel) -> Runner:
        """A runner of the adapted model. A CPU compiles its step in `warm_up` only: here requests would wait for it."""
        encoder_decoder = adapted.model if isinstance(adapted.model, EncoderDecoderModule) else None
        runner = Runner(decoder_of(adapted.model), encoder_decoder, self.base.store, before_forward=self.write_slots)
        runner.last = self.base.last  # a request may be in batches of both runners
        runner.read_stream = self.base.read_stream
        if self.compile and runner.device.type == "cuda":
            warnings.warn(
                "requests with adapters are decoded by CUDA graphs of the ordinary layers: the fused ones, which "
                "requests without adapters use, have no place for the products of adapters",
                stacklevel=4,
            )
            runner.graphs = DecodeGraphs(runner.decode_step, runner.store.rows, runner.device)
        return runner

    def read(self, folder: str | Path, source_family: str | None = None) -> LoraWeights:
        """The adapter of a folder. source_family: of the model in `transformers`, whose names the adapter may have."""
        spec: Any = self.model.spec
        return read_lora(self.model, folder, lambda: weight_table(spec, source_family))

    def warm_up(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """As `Engine.warm_up`, for batches with adapters. On a CPU it compiles their decode step, which takes long."""
        if self.runner is None or self.adapted is None:
            return
        self.adapted.rows.write_decode([], [])
        if self.compile and self.base.has_cpu_step and self.runner.compiled is None:
            self.has_warned = True  # if it is impossible, another warning gives the reason
            self.runner.compile()
        self.runner.warm_up(progress)

    def unload(self, name: str) -> None:
        del self.loaded[self.find(name).name]

    def find(self, name: str) -> Adapter:
        if name not in self.loaded:
            hint = suggest_name(str(name), self.loaded) if self.loaded else "no adapter is loaded"
            raise AdapterError(f"there is no adapter {name!r:.100}; {hint}")
        return self.loaded[name]

    def copy_model(self) -> AdaptedModel:
        device = next(decoder_of(self.model).parameters()).device
        served = "decoder." if isinstance(self.model, InterleavedModule) else ""
        return AdaptedModel(self.model, AdapterRows(self.base.store.rows, self.max_loras, device), served)

    def can_run(self, request: Request, running: Iterable[Request]) -> bool:
        """Whether there is a slot for the request beside those of the running ones."""
        used = adapters_of(running)
        return request.adapter is None or request.adapter in used or len(used) < self.max_loras

    def forward(self, batch: ScheduledBatch, running: Iterable[Request]) -> Tensor:
        """As `Runner.forward`, for a batch in which some requests have an adapter."""
        assert self.runner is not None
        self.warn_if_slow(self.runner)
        self.fill_slots(adapters_of(request for request, _ in batch), adapters_of(running))
        return self.runner.forward(batch)

    def write_slots(self, batch: ScheduledBatch, prepared: bool) -> None:
        """Write the adapter slot of every row, before a forward of the runner."""
        assert self.adapted is not None
        slots = [-1 if request.adapter is None else self.slot_of[request.adapter] for request, _ in batch]
        if prepared:
            self.adapted.rows.write_decode([request.row or 0 for request, _ in batch], slots)
        else:
            self.adapted.rows.write(slots)

    def warn_if_slow(self, runner: Runner) -> None:
        """Once, with the first request that has an adapter: the ones without are decoded by a compiled step."""
        is_slow = runner.device.type == "cpu" and self.base.has_cpu_step and runner.compiled is None
        if is_slow and not self.has_warned:
            self.has_warned = True
            warnings.warn(
                "requests with adapters are decoded eagerly: an adapter was loaded, the first one or one with other "
                "layers or a higher rank than before, after the decode step was compiled. Give the adapters at the "
                "start (regard serve --lora-modules), or call Engine.warm_up after loading them",
                stacklevel=2,
            )

    def decoder_with(self, adapter: Adapter, running: Iterable[Request]) -> nn.Module:
        """The decoder, in which all tokens have this adapter until the next forward."""
        self.fill_slots({adapter: None}, adapters_of(running))
        assert self.adapted is not None
        self.adapted.rows.write([self.slot_of[adapter]])
        return decoder_of(self.adapted.model)

    def fill_slots(self, needed: dict[Adapter, None], running: dict[Adapter, None]) -> None:
        """Copy adapters into slots, where they are not in one already."""
        assert len(needed) <= self.max_loras, "the scheduler admits requests of at most max_loras adapters"
        assert self.adapted is not None
        for adapter in needed:
            slot = self.slot_of.pop(adapter, None)
            if slot is None:
                slot = self.free_slot(needed, running)
                self.adapted.load(slot, adapter.weights)
            self.slot_of[adapter] = slot  # the last: used most recently

    def free_slot(self, needed: dict[Adapter, None], running: dict[Adapter, None]) -> int:
        """A slot that is empty, or the least recently used, preferably of an adapter that no running request has."""
        empty = set(range(self.max_loras)) - set(self.slot_of.values())
        if empty:
            return min(empty)
        others = [adapter for adapter in self.slot_of if adapter not in needed]
        unloaded = [adapter for adapter in others if self.loaded.get(adapter.name) is not adapter]
        idle = [adapter for group in (unloaded, others) for adapter in group if adapter not in running]
        return self.slot_of.pop((idle or others)[0])


def adapters_of(requests: Iterable[Request]) -> dict[Adapter, None]:
    """The adapters of requests, each once, in their order."""
    return {request.adapter: None for request in requests if request.adapter is not None}


def on_host(weights: LoraWeights) -> LoraWeights:
    def copy(matrix: Tensor) -> Tensor:
        return matrix.detach().to("cpu", copy=True)

    layers = {
        path: LayerMatrices(copy(a), copy(b), None if gain is None else copy(gain))
        for path, (a, b, gain) in weights.layers.items()
    }
    return LoraWeights(layers, weights.rank, weights.scale)
