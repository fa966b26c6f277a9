"""Modules without memory for their weights, to be counted or filled: any size is built in an instant."""

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
    """No normal draws in here: on the meta device the first one imports torch's compiler, which takes seconds."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.__name__ == "normal_":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


@contextmanager
def meta_device() -> Generator[None]:
    """What is built in here has shapes, but no memory and no draws."""
    with torch.device("meta"), SkipNormalInit():
        yield


def build_on_meta(spec: Builds[BuiltModule]) -> BuiltModule:
    with meta_device():
        return spec.build()
