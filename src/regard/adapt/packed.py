"""Linear layers laid out for decoding: the weight is kept as (in, out), so that one row of input streams it in order.

    y = x Wᵀ + b          the same product, read along its rows

On CPUs a product with one row costs the reading of the weight, and F.linear's layout (out, in) is read more slowly.
Packing is for inference: it is done on a copy of the modules, as they are now, and no checkpoint ever sees it.
"""

from copy import deepcopy
from typing import TypeVar

from torch import Tensor, nn

from regard.adapt.surgery import swap

M = TypeVar("M", bound=nn.Module)


class PackedLinear(nn.Module):
    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight_t = nn.Parameter(linear.weight.detach().t().contiguous(), requires_grad=False)  # (in, out)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight_t
        return y if self.bias is None else y + self.bias


def packed(model: M) -> M:
    """A copy of the modules with the linears that it now has packed; all other weights are the original's own."""
    shared = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    copy = deepcopy(model, shared)
    swap(copy, lambda _, module: type(module) is nn.Linear, pack)
    return copy


def pack(_: str, module: nn.Module) -> nn.Module:
    assert isinstance(module, nn.Linear)
    return PackedLinear(module)
