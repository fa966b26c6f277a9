"""Linear layers with many adapters in memory, one for each row of a batch.

    y = W x + s_i B_i A_i x                      i: the slot of the row's adapter, or none
    y = W x + (g_i - 1) ⊙ W x + s_i B_i A_i x    DoRA, with B_i that includes the factors g_i of the outputs

The matrices of all adapters are stacked by slot (kernels/many_lora.py). Before a forward, `AdapterRows` gets the slot
of every row; all layers share it. The layers replace those of a copy of the model's modules that shares all weights,
so the model itself, and its checkpoints, do not change.

Experts multiply rows that are sorted by expert. Their adapters are stacked by expert and slot, and a wrapper of the
router notes which token a sorted row belongs to.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard.adapt.lora_weights import LayerMatrices, LoraWeights
from regard.adapt.replace_modules import copy_modules
from regard.adapt.targets import AdapterError, adaptable_weights, training_only
from regard.kernels.grouped_matmul import sort_by_expert
from regard.kernels.many_lora import add_lora
from regard.parts.experts import ExpertsModule
from regard.parts.router import RouterModule, Routing
from regard.spec import suggest_name

LayerTensors = tuple[Tensor, Tensor, Tensor | None]  # a, b and gain of ManyLora
MIN_RANK = 8  # ranks are rounded up to a power of two, so that most adapters fit into the first tensors


class AdapterRows:
    """The adapter slots of the rows of a forward; -1: no adapter."""

    def __init__(self, rows: int, max_loras: int, device: torch.device):
        """rows: of a decode step. It may be a CUDA graph, and therefore reads a tensor that is kept."""
        self.max_loras = max_loras
        self.decode = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self.batch: Tensor | None = None  # (B,) of other forwards
        self.sorted: Tensor | None = None  # (T·k,) expert · max_loras + slot of the rows that the last router sorted

    def write(self, slots: Sequence[int]) -> None:
        """Before the forward of a batch with these rows. A single slot is that of all rows."""
        self.batch = self.tensor(slots)

    def write_decode(self, rows: Sequence[int], slots: Sequence[int]) -> None:
        """Before a decode step over the first rows of the store, of which these have an adapter."""
        by_row = [-1] * len(self.decode)
        for row, slot in zip(rows, slots, strict=True):
            by_row[row] = slot
        self.decode.copy_(self.tensor(by_row), non_blocking=True)
        self.batch = None

    def tensor(self, slots: Sequence[int]) -> Tensor:
        device = self.decode.device
        on_host = torch.tensor(slots, dtype=torch.int32, pin_memory=device.type == "cuda")
        return on_host.to(device, non_blocking=True)

    def __deepcopy__(self, memo: dict) -> "AdapterRows":
        return self  # layers of a copied model have the same rows

    def of(self, x: Tensor) -> Tensor:
        """The slots of the rows of x, whose tokens may be flattened: (N,)"""
        return self.decode[: len(x)] if self.batch is None else self.batch

    def sort(self, chosen: Tensor, experts: int) -> None:
        """Note the slots of the rows as they will be sorted by expert. chosen: (T, k)"""
        slots = self.of(chosen)
        slots = slots.unsqueeze(-1).expand(-1, chosen.numel() // len(slots)).flatten()  # (T·k,)
        order, _ = sort_by_expert(chosen.flatten(), experts)
        combined = chosen.flatten().to(torch.int32) * self.max_loras + slots
        self.sorted = torch.where(slots >= 0, combined, -1)[order]


class ManyLora(nn.Module):
    """A linear layer, or one per expert, and the matrices of its adapters by slot."""

    a: Tensor
    b: Tensor
    scale: Tensor
    gain: Tensor | None

    def __init__(self, base: nn.Module, weight: Tensor, rows: AdapterRows):
        super().__init__()
        self.base, self.rows = base, rows
        *experts, outputs, inputs = weight.shape
        self.groups = (*experts, rows.max_loras)
        precision = torch.promote_types(weight.dtype, torch.float32)
        a, b = weight.new_zeros(*self.groups, 0, inputs), weight.new_zeros(*self.groups, outputs, 0)
        # buffers: copies of the module share them
        self.register_buffer("a", a.flatten(0, -3), persistent=False)  # (G, r, in), G = max_loras · experts, if any
        self.register_buffer("b", b.flatten(0, -3), persistent=False)  # (G, out, r)
        self.register_buffer("scale", torch.zeros(len(self.a), dtype=precision, device=a.device), persistent=False)
        self.register_buffer("gain", None, persistent=False)  # (G + 1, out) g - 1; the last row, of no adapter, is zero

    def forward(self, x: Tensor, *ends: Tensor) -> Tensor:
        y = self.base(x, *ends).contiguous()
        index = self.rows.sorted if ends else self.rows.of(x)
        assert index is not None, "a router notes the order of its rows before the experts run"
        if self.gain is not None:
            self.scale_outputs(y, self.gain, index)
        add_lora(y, x, self.a, self.b, self.scale, index)
        return y

    def scale_outputs(self, y: Tensor, gain: Tensor, index: Tensor) -> None:
        """Multiply W x in y by the factors of each row's adapter, in place; rows without one are not changed."""
        bias: Any = self.base.bias
        rows = y.view(len(index), -1, y.shape[-1])  # (N, L, out)
        rows += gain[index.long()].unsqueeze(1) * (rows if bias is None else rows - bias)

    @property
    def rank(self) -> int:
        return self.a.shape[-2]

    def fits(self, matrices: LayerMatrices) -> bool:
        """Whether there is room for an adapter of this rank and kind."""
        return self.rank >= matrices.a.shape[-2] and (self.gain is not None or matrices.gain is None)

    def grown(self, matrices: LayerMatrices) -> LayerTensors:
        """New tensors with room for an adapter. CUDA graphs that were captured before read the old ones."""
        a, b, gain = self.tensors()
        if (rank := matrices.a.shape[-2]) > self.rank:
            extra = max(MIN_RANK, 1 << (rank - 1).bit_length()) - self.rank
            a, b = nn.functional.pad(a, (0, 0, 0, extra)), nn.functional.pad(b, (0, extra))
        if gain is None and matrices.gain is not None:
            gain = b.new_zeros(len(b) + 1, b.shape[1])
        return a, b, gain

    def tensors(self) -> LayerTensors:
        return self.a, self.b, self.gain

    def load(self, slot: int, matrices: LayerMatrices | None, scale: float) -> None:
        """Copy an adapter into a slot; None: the adapter does not change this layer."""
        a, b = (tensor.unflatten(0, self.groups)[..., slot, :, :] for tensor in (self.a, self.b))
        a.zero_()
        b.zero_()
        if self.gain is not None:
            self.gain[slot] = 0 if matrices is None or matrices.gain is None else matrices.gain - 1
        if matrices is not None:
            rank = matrices.a.shape[-2]
            a[..., :rank, :].copy_(matrices.a)
            b[..., :rank].copy_(matrices.b)
        self.scale.unflatten(0, self.groups)[..., slot] = scale


class NotedRouter(RouterModule):
    """A router that notes the slots of the rows which its experts will get."""

    def __init__(self, router: RouterModule, experts: int, rows: AdapterRows):
        nn.Module.__init__(self)
        self.__dict__.update(router.__dict__)  # its settings and submodules, whose paths do not change
        self.experts, self.rows = experts, rows

    def route(self, logits: Tensor) -> Routing:
        routing = super().route(logits)
        self.rows.sort(routing.chosen, self.experts)
        return routing


class AdaptedModel:
    """A copy of a model's modules, in which the layers that some adapter changes are ManyLora."""

    def __init__(self, model: nn.Module, rows: AdapterRows, served: str = ""):
        """served: the prefix of the layers that the engine runs; an image encoder runs outside of it."""
        self.model, self.rows = copy_modules(model), rows
        self.weights = {
            path: weight
            for path, weight in adaptable_weights(self.model).items()
            if path.startswith(served)
            and "head" not in path.split(".")
            and not path.startswith(training_only(self.model) or "\0")
        }
        self.layers: dict[str, ManyLora] = {}

    def check(self, adapter: LoraWeights) -> None:
        """Raise AdapterError if the adapter does not fit the model, or changes a layer that cannot have many."""
        for path, (a, b, gain) in adapter.layers.items():
            if path not in self.weights:
                raise AdapterError(
                    f"the adapter changes {path}, for which requests of one batch cannot have different adapters; "
                    f"merge it instead (--adapter), or choose other targets; {suggest_name(path, self.weights)}"
                )
            weight = self.weights[path].weight
            *experts, outputs, inputs = weight.shape
            expected = (*experts, adapter.rank, inputs), (*experts, outputs, adapter.rank)
            if (tuple(a.shape), tuple(b.shape)) != expected or gain is not None and (experts or len(gain) != outputs):
                raise AdapterError(
                    f"the adapter of {path} has A {tuple(a.shape)} and B {tuple(b.shape)}, but this model needs "
                    f"{expected[0]} and {expected[1]}; load it with the model that it was trained on"
                )

    def prepare(self, adapter: LoraWeights) -> Callable[[], None] | None:
        """Make room for an adapter; returns a function that undoes it, or None if nothing had to change.

        Modules and the addresses of tensors change. All tensors are allocated before the first change, so if memory
        runs out, the model is as before.
        """
        added = {
            path: ManyLora(self.weights[path].module, self.weights[path].weight, self.rows).eval()
            for path in adapter.layers
            if path not in self.layers
        }
        layers = {path: added.get(path) or self.layers[path] for path in adapter.layers}
        small = {layer: adapter.layers[path] for path, layer in layers.items() if not layer.fits(adapter.layers[path])}
        grown = [(layer, layer.grown(matrices)) for layer, matrices in small.items()]
        before = [(layer, layer.tensors()) for layer in small]

        def undo() -> None:
            for path in added:
                self.put(path, self.layers.pop(path).base)
            write_tensors(before)

        for path, layer in added.items():
            self.put(path, layer)
            self.layers[path] = layer
        if any(self.weights[path].stacked for path in added):
            self.note_routes()
        write_tensors(grown)
        return undo if grown else None

    def put(self, path: str, module: nn.Module) -> None:
        for name in self.weights[path].names:
            self.model.set_submodule(name, module)

    def note_routes(self) -> None:
        for module in self.model.modules():
            if isinstance(module, ExpertsModule) and not isinstance(module.router, NotedRouter):
                module.router = NotedRouter(module.router, module.spec.count, self.rows)

    def load(self, slot: int, adapter: LoraWeights) -> None:
        for path, layer in self.layers.items():
            layer.load(slot, adapter.layers.get(path), adapter.scale)


def write_tensors(layers: list[tuple[ManyLora, LayerTensors]]) -> None:
    for layer, tensors in layers:
        layer.a, layer.b, layer.gain = tensors
