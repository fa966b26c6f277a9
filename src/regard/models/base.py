"""Model: the base of specs that can be built, trained, saved and loaded on their own."""

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
        """The module, with this spec as its `spec`; weights are drawn from the global generator."""
        raise NotImplementedError

    def build(self, seed: int | None = None, scheme: Scheme = "fan_in") -> Built:
        """The module with initial weights drawn from `seed`; the global generator stays unchanged."""
        if seed is None:
            return self.module(scheme)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.module(scheme)
