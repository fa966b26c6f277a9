"""What autoencoders, variational autoencoders and GANs are made of: their networks, and what their specs share.

    MLP(x) = W (layer_n ∘ … ∘ layer_1)(x) + b          layer(x) = norm(σ(V x + c)); without layers one linear map

Spectral normalization divides the matrix of every linear map by its largest singular value, which bounds the Lipschitz
constant of the network by that of its activations and norms (Miyato et al. 2018). The singular value is exact, not that
of a power iteration: the matrices are small, and a forward pass then changes no state of a frozen network.
"""

from dataclasses import dataclass
from math import prod
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.models.base import Model
from regard.models.heads import Dense
from regard.parts.feedforward import Activation
from regard.spec import Spec, require

BuiltGenerative = TypeVar("BuiltGenerative", bound=nn.Module)


@dataclass(frozen=True)
class MLP(Spec):
    hidden: tuple[int, ...] = (256, 256)  # widths of the layers; (): one linear map
    layer: Dense = Dense("silu")
    spectral_norm: bool = False

    def check(self) -> None:
        require(all(width > 0 for width in self.hidden), f"mlp: hidden={self.hidden} must be positive")

    def build(self, width: int, out: int) -> nn.Module:
        return MLPModule(width, out, self)


class MLPModule(nn.Module):
    no_muon = ("out",)

    def __init__(self, width: int, out: int, spec: MLP):
        super().__init__()
        linear = SpectralLinear if spec.spectral_norm else nn.Linear
        widths = (width, *spec.hidden)
        self.layers = nn.Sequential(
            *(spec.layer.build(*pair, linear) for pair in zip(widths, spec.hidden, strict=False))
        )
        self.out = linear(widths[-1], out)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(x))


class SpectralLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight / torch.linalg.matrix_norm(self.weight, 2), self.bias)


@dataclass(frozen=True)
class Generative(Model[BuiltGenerative]):
    """A model between data of one shape and codes z of `latent` numbers."""

    shape: tuple[int, ...] = (1, 8, 8)  # of one example: (channels, height, width) of an image, (2,) of a point
    latent: int = 8
    output: Activation = "identity"  # of decoded values; tanh for images from -1 to 1

    def check(self) -> None:
        require(
            bool(self.shape) and min(self.shape) > 0,
            f"{self.kind}: shape={self.shape} needs a positive size per dimension, such as (1, 8, 8) or (2,)",
        )
        require(self.latent > 0, f"{self.kind}: latent={self.latent} must be positive")

    @property
    def values(self) -> int:
        """The number of values of one example."""
        return prod(self.shape)

    @property
    def compression(self) -> float:
        """The share of the numbers of an example that its code saves: 1 - latent / values."""
        return 1 - self.latent / self.values
