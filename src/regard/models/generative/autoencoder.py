"""The autoencoder: an encoder f to a code of few numbers, and a decoder g back. Hinton & Salakhutdinov 2006.

    z = f(x)          x̂ = g(z)

Both halves are trained at once to reconstruct x (objectives/reconstruction.py). A code of fewer numbers than x keeps
what most examples have in common; one as wide as x can copy it. Without hidden layers, both halves are linear, and the
best code spans the first principal components (Baldi & Hornik 1989).

Examples unlike those of the training have a large error ‖x - x̂‖², which finds anomalies. Nothing determines how codes
are distributed, so an autoencoder reconstructs, but it cannot generate: a random code may be far from all codes that
the decoder was trained on.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from regard.models.base import Scheme, initialize
from regard.models.generative.base import MLP, Generative
from regard.parts.feedforward import ACTIVATIONS


@dataclass(frozen=True)
class Autoencoder(Generative["AutoencoderModule"]):
    """encoder: the network from an example to its code; decoder: the one back."""

    encoder: MLP = MLP()
    decoder: MLP = MLP()

    def module(self, scheme: Scheme) -> "AutoencoderModule":
        return AutoencoderModule(self, scheme)


class AutoencoderModule(nn.Module):
    def __init__(self, spec: Autoencoder, scheme: Scheme = "fan_in"):
        super().__init__()
        self.spec = spec
        self.encoder = spec.encoder.build(spec.values, spec.latent)
        self.decoder = spec.decoder.build(spec.latent, spec.values)
        self.output = ACTIVATIONS[spec.output]
        initialize(self, 1, scheme)

    def forward(self, x: Tensor) -> Tensor:
        """The reconstruction (B, *shape)."""
        return self.decode(self.encode(x))

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x.flatten(1))  # (B, latent)

    def decode(self, z: Tensor) -> Tensor:
        return self.output(self.decoder(z)).unflatten(-1, self.spec.shape)  # (B, *shape)
