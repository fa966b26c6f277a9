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
from regard.engine.runner import Runner, Step
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
        self.runner: AdaptedRunner | None = None

    def load(self, name: str, weights: LoraWeights) -> None:
        """Raises AdapterError if the adapter does not fit the model, or the limit is reached.

        After this or any other error, such as too little memory, the loaded adapters are as before.
        """
        check_name(name)
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
        adapted, runner = self.adapted or self.copy_model(), self.runner
        adapted.check(weights)
        weights = on_host(weights)
        undo = adapted.prepare(weights)
        if undo is not None or runner is None:
            try:
                runner = AdaptedRunner(adapted, self.base)
                if self.compile:
                    runner.compile()
            except BaseException:
                if undo is not None:
                    undo()
                raise
        self.adapted, self.runner = adapted, runner
        self.loaded[name] = Adapter(name, weights, next(self.versions))

    def read(self, folder: str | Path, source_family: str | None = None) -> LoraWeights:
        """The adapter of a folder. source_family: of the model in `transformers`, whose names the adapter may have."""
        spec: Any = self.model.spec
        return read_lora(self.model, folder, lambda: weight_table(spec, source_family))

    def warm_up(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """As `Engine.warm_up`, for batches with adapters. On a CPU it compiles their decode step, which takes long."""
        if self.runner is not None:
            if self.compile and self.base.compiled is not None and self.runner.compiled is None:
                self.runner.compile_on_cpu()
            self.runner.warm_up(progress)

    def unload(self, name: str) -> None:
        del self.loaded[self.find(name).name]

    def find(self, name: str) -> Adapter:
        if name not in self.loaded:
            hint = suggest_name(str(name), self.loaded) if self.loaded else "no adapter is loaded"
            raise AdapterError(f"there is no adapter {name!r:.100}; {hint}")
        return self.loaded[name]

    def copy_model(self) -> AdaptedModel:
        device = decoder_of(self.model).embedding.weight.device
        served = "decoder." if isinstance(self.model, InterleavedModule) else ""
        return AdaptedModel(self.model, AdapterRows(self.base.store.rows, self.max_loras, device), served)

    def can_run(self, request: Request, running: Iterable[Request]) -> bool:
        """Whether there is a slot for the request beside those of the running ones."""
        used = adapters_of(running)
        return request.adapter is None or request.adapter in used or len(used) < self.max_loras

    def forward(self, batch: ScheduledBatch, running: Iterable[Request]) -> Tensor:
        """As `Runner.forward`, for a batch in which some requests have an adapter."""
        self.fill_slots(adapters_of(request for request, _ in batch), adapters_of(running))
        assert self.runner is not None
        return self.runner.forward_with_slots(batch, self.slot_of)

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


class AdaptedRunner(Runner):
    """A runner of the adapted model, which gets the adapter slot of every row before a forward."""

    def __init__(self, adapted: AdaptedModel, base: Runner):
        model = adapted.model
        encoder_decoder = model if isinstance(model, EncoderDecoderModule) else None
        super().__init__(decoder_of(model), encoder_decoder, base.store)
        self.last = base.last  # a request may be in batches of both runners
        self.base, self.rows = base, adapted.rows
        self.slot_of: dict[Adapter, int] = {}
        self.has_warned = False

    def compile(self) -> None:
        """Prepare CUDA graphs. A CPU compiles the step in `Adapters.warm_up` only: here requests would wait for it."""
        if self.device.type != "cuda":
            return
        warnings.warn(
            "requests with adapters are decoded by CUDA graphs of the ordinary layers: the fused ones, which requests "
            "without adapters use, have no place for the products of adapters",
            stacklevel=4,
        )
        self.graphs = DecodeGraphs(self.decode_step, self.store.rows, self.device)

    def compile_on_cpu(self) -> None:
        self.has_warned = True  # if it is impossible, another warning gives the reason
        self.rows.write_decode([], [])
        super().compile()

    def warn_if_slow(self) -> None:
        """Once, with the first request that has an adapter: the ones without are decoded by a compiled step."""
        is_slow = self.device.type == "cpu" and self.base.compiled is not None and self.compiled is None
        if is_slow and not self.has_warned:
            self.has_warned = True
            warnings.warn(
                "requests with adapters are decoded eagerly: an adapter was loaded, the first one or one with other "
                "layers or a higher rank than before, after the decode step was compiled. Give the adapters at the "
                "start (regard serve --lora-modules), or call Engine.warm_up after loading them",
                stacklevel=2,
            )

    def warm_up(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        self.rows.write_decode([], [])
        super().warm_up(progress)

    def forward_with_slots(self, batch: ScheduledBatch, slot_of: dict[Adapter, int]) -> Tensor:
        self.warn_if_slow()
        batch.sort(key=lambda pair: pair[0].row)
        self.slot_of = slot_of
        self.rows.write(self.adapter_slots(batch))
        return self.forward(batch)

    def adapter_slots(self, batch: ScheduledBatch) -> list[int]:
        return [-1 if request.adapter is None else self.slot_of[request.adapter] for request, _ in batch]

    def decode(self, batch: ScheduledBatch, step: Step) -> Tensor:
        self.rows.write_decode([request.row or 0 for request, _ in batch], self.adapter_slots(batch))
        return super().decode(batch, step)

    def replay(self, batch: ScheduledBatch, graphs: DecodeGraphs) -> Tensor | None:
        self.rows.write_decode([request.row or 0 for request, _ in batch], self.adapter_slots(batch))
        logits = super().replay(batch, graphs)
        if logits is None:
            self.rows.write(self.adapter_slots(batch))  # the batch runs eagerly
        return logits


def adapters_of(requests: Iterable[Request]) -> dict[Adapter, None]:
    """The adapters of requests, each once, in their order."""
    return {request.adapter: None for request in requests if request.adapter is not None}


def on_host(weights: LoraWeights) -> LoraWeights:
    def copy(matrix: Tensor) -> Tensor:
        return matrix.detach().to("cpu", copy=True)

    layers = {path: LayerMatrices(copy(a), copy(b)) for path, (a, b) in weights.layers.items()}
    return LoraWeights(layers, weights.rank, weights.scale)


def check_name(name: str) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise AdapterError(f"{name!r:.80} is not a name for an adapter; use 1 to {MAX_NAME} printable characters")
