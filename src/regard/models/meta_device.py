"""Building modules on the meta device: parameters with shapes but no storage, to be counted or loaded into."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

BuiltModule = TypeVar("BuiltModule", bound=nn.Module, covariant=True)


class Builds(Protocol[BuiltModule]):
    def build(self) -> BuiltModule: ...


class SkipNormalInit(TorchFunctionMode):
    """Skips normal_: on the meta device its first call imports torch's compiler, which takes seconds."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.__name__ == "normal_":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


@contextmanager
def meta_device() -> Generator[None]:
    """Modules built in this context have shapes, but no storage and no random initialization."""
    with torch.device("meta"), SkipNormalInit():
        yield


def build_on_meta(spec: Builds[BuiltModule]) -> BuiltModule:
    with meta_device():
        return spec.build()
