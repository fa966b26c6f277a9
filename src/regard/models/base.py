"""Building a model from its spec: the base of model specs, initial weights, and the meta device.

A scheme sets the deviation of the initial weights. Projections into the residual stream get a smaller one, which
depends on the depth of the stack, so that the stream does not grow with depth.

    fan_in     normal, 1/√columns; into the stream divided by √(2·depth)
    gpt2       normal, 0.02; into the stream divided by √(2·depth)                    Radford et al. 2019
    xavier     uniform within ±√(6/(rows + columns)); embeddings normal, 1/√columns   Glorot & Bengio 2010, Vaswani 2017
    deepnorm   xavier times (8·depth)^-¼ for values, outputs and feed-forward; with   Wang et al. 2022
               `keep` = (2·depth)^¼ in post-norm blocks, for a thousand layers
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.parts.experts import GroupedLinear
from regard.spec import Spec

Built = TypeVar("Built", bound=nn.Module)
# GPT-2's 0.02 is 1/√2500: a model of width 128 then starts with flat attention, and learned less in the same time
# (docs/log.md). With fan_in the initial logits have a deviation of about 1, so the loss is about ln V + 1/2.
Scheme = Literal["fan_in", "gpt2", "xavier", "deepnorm"]
INTO_STREAM = ("o_proj", "down_proj")
DEEPNORM_SCALED = ("v_proj", "up_proj", "gate_proj", *INTO_STREAM)


@dataclass(frozen=True)
class Model(Spec, Generic[Built]):
    """A spec that can be built, trained, saved and loaded on its own."""

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


def initialize(model: nn.Module, depth: int, scheme: Scheme = "fan_in") -> None:
    """Draw the weights of linear layers and embeddings, set biases to zero; norms and convolutions are unchanged."""
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        if isinstance(module, nn.Linear | nn.Embedding | GroupedLinear):
            draw_weight(module.weight, name, depth, scheme, isinstance(module, nn.Embedding))
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)


def draw_weight(weight: Tensor, name: str, depth: int, scheme: Scheme, embedding: bool = False) -> None:
    rows, columns = weight.shape[-2:]
    if scheme in ("xavier", "deepnorm") and not embedding:
        gain = (8 * depth) ** -0.25 if scheme == "deepnorm" and name in DEEPNORM_SCALED else 1.0
        bound = gain * (6 / (rows + columns)) ** 0.5
        nn.init.uniform_(weight, -bound, bound)
    else:
        std = 0.02 if scheme == "gpt2" else columns**-0.5
        nn.init.normal_(weight, std=std / (2 * depth) ** 0.5 if name in INTO_STREAM else std)


class SkipRandomInit(TorchFunctionMode):
    """Skips random draws: on the meta device the first normal_ imports torch's compiler, which takes seconds."""

    skipped = frozenset(("normal_", "uniform_", "kaiming_uniform_"))

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.__name__ in self.skipped:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


@contextmanager
def meta_device() -> Generator[None]:
    """Modules built in this context have shapes, but no storage and no random initialization."""
    with torch.device("meta"), SkipRandomInit():
        yield


def build_on_meta(spec: Model[Built]) -> Built:
    """The module on the meta device, to count its parameters or to load weights into."""
    with meta_device():
        return spec.build()
