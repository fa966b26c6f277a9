"""The size of the largest tensor that some code allocates, to prove that a large intermediate is never allocated."""

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """`numel` is the number of elements of the largest tensor allocated in this context; views do not count."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        input_storages = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in input_storages:
                self.numel = max(self.numel, x.numel())
        return out
