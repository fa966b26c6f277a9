"""The size of the largest tensor that some code creates, to prove that a large intermediate is never allocated."""

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """`numbers` is the largest numel of the tensors that are created in this context."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        created = [x for x in (out if isinstance(out, tuple | list) else [out]) if isinstance(x, Tensor)]
        self.numbers = max([self.numbers, *(x.numel() for x in created)])
        return out
