"""An attention layer for tests: its taps and weights, its FLOPs, and the bytes of saved tensors and caches."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from regard.engine.stores.contiguous import Contiguous
from regard.kernels.attention.mask import Full
from regard.layout import TokenLayout
from regard.parts.attention import Attention, AttentionModule

WIDTH, LENGTH = 16, 7


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attention(heads: int = 2, kv_heads: int | None = None, width: int = WIDTH, **fields) -> AttentionModule:
    """An attention layer without a mask; its projections are large enough that attention is far from uniform."""
    module = Attention(heads, kv_heads, mask=Full(), **fields).build(width).double().requires_grad_(False)
    for n, weight in enumerate(module.parameters()):
        weight.copy_(random(*weight.shape, seed=n) * (2 * WIDTH / width) ** 0.5 / WIDTH**0.5)
    return module


def record(module: AttentionModule, x: Tensor) -> dict[str, Tensor]:
    """The values of the taps (queries, keys, values, outputs of the heads) and the attention weights."""
    taps: dict[str, Tensor] = {}
    hooks = [
        getattr(module, name).register_forward_hook(lambda _, __, out, name=name: taps.update({name: out}))
        for name in "qkvz"
    ]
    layout = TokenLayout.whole(*x.shape[:2])
    module(x, layout)
    for hook in hooks:
        hook.remove()
    return taps | {"weights": module.attention_map({"q": taps["q"], "k": taps["k"]}, layout, slice(None))}


def flops(module: nn.Module, x: Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        module(x, TokenLayout.whole(*x.shape[:2]))
    return counter.get_total_flops()


def saved_bytes(run: Callable[[], object]) -> int:
    """Bytes that autograd saves for the backward, each storage counted once."""
    storage_bytes: dict[int, int] = {}

    def save(x: Tensor) -> Tensor:
        storage_bytes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
        result = run()  # kept alive: the address of a freed storage may be used again
    del result
    return sum(storage_bytes.values())


def bytes_of(store: Contiguous) -> int:
    return sum(array.nbytes for storage in store.storages for array in storage.arrays.values())
