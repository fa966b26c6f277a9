"""Linear layers with many adapters in memory, one for each row of a batch.

    y = W x + s_i B_i A_i x          i: the slot of the row's adapter, or none

The matrices of all adapters are stacked by slot (kernels/many_lora.py). Before a forward, `AdapterRows` gets the slot
of every row; all layers share it. The layers replace those of a copy of the model's modules that shares all weights,
so the model itself, and its checkpoints, do not change.

Experts multiply rows that are sorted by expert. Their adapters are stacked by expert and slot, and a wrapper of the
router notes which token a sorted row belongs to.
"""

from collections.abc import Callable, Sequence

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

    def forward(self, x: Tensor, *ends: Tensor) -> Tensor:
        y = self.base(x, *ends).contiguous()
        index = self.rows.sorted if ends else self.rows.of(x)
        assert index is not None, "a router notes the order of its rows before the experts run"
        add_lora(y, x, self.a, self.b, self.scale, index)
        return y

    @property
    def rank(self) -> int:
        return self.a.shape[-2]

    def grown(self, rank: int) -> tuple[Tensor, Tensor]:
        """New tensors a and b for adapters of this rank. CUDA graphs that were captured before read the old ones."""
        extra = max(MIN_RANK, 1 << (rank - 1).bit_length()) - self.rank
        return nn.functional.pad(self.a, (0, 0, 0, extra)), nn.functional.pad(self.b, (0, extra))

    def load(self, slot: int, matrices: LayerMatrices | None, scale: float) -> None:
        """Copy an adapter into a slot; None: the adapter does not change this layer."""
        a, b = (tensor.unflatten(0, self.groups)[..., slot, :, :] for tensor in (self.a, self.b))
        a.zero_()
        b.zero_()
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
        for path, (a, b) in adapter.layers.items():
            if path not in self.weights:
                raise AdapterError(
                    f"the adapter changes {path}, for which requests of one batch cannot have different adapters; "
                    f"merge it instead (--adapter), or choose other targets; {suggest_name(path, self.weights)}"
                )
            weight = self.weights[path].weight
            *experts, outputs, inputs = weight.shape
            expected = (*experts, adapter.rank, inputs), (*experts, outputs, adapter.rank)
            if (tuple(a.shape), tuple(b.shape)) != expected:
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
        grown = [(layer, *layer.grown(adapter.rank)) for layer in layers.values() if layer.rank < adapter.rank]
        before = [(layer, layer.a, layer.b) for layer, _, _ in grown]

        def undo() -> None:
            for path in added:
                self.put(path, self.layers.pop(path).base)
            write_matrices(before)

        for path, layer in added.items():
            self.put(path, layer)
            self.layers[path] = layer
        if any(self.weights[path].stacked for path in added):
            self.note_routes()
        write_matrices(grown)
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


def write_matrices(layers: list[tuple[ManyLora, Tensor, Tensor]]) -> None:
    for layer, a, b in layers:
        layer.a, layer.b = a, b
