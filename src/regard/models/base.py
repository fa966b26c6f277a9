"""A model: the spec of something whole, which can be built, trained, saved and loaded by itself."""

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import nn

from regard.models.initialize import Scheme
from regard.spec import Spec

Built = TypeVar("Built", bound=nn.Module)


@dataclass(frozen=True)
class Model(Spec, Generic[Built]):
    def module(self, scheme: Scheme) -> Built:
        """Its module, which keeps it as `spec`; weights drawn from the global generator."""
        raise NotImplementedError

    def build(self, seed: int | None = None, scheme: Scheme = "fan_in") -> Built:
        """The module with fresh weights, drawn from this seed (the global generator is left alone)."""
        if seed is None:
            return self.module(scheme)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.module(scheme)
