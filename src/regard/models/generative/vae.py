"""The variational autoencoder: the encoder returns a distribution of codes. Kingma & Welling 2014.

    q(z | x) = N(μ(x), σ(x)²)          z = μ + σ ε, ε ~ N(0, I)          x̂ = g(z)

Because the randomness is in ε, gradients reach μ and σ (reparameterization). The objective pulls q(z | x) towards
N(0, I) (objectives/reconstruction.py), so that decoding z ~ N(0, I) generates new examples; the encoder is not
needed for that.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from regard.models.base import Scheme, initialize
from regard.models.generative.base import MLP, Generative
from regard.parts.feedforward import ACTIVATIONS


@dataclass(frozen=True)
class VAE(Generative["VAEModule"]):
    encoder: MLP = MLP()
    decoder: MLP = MLP()

    def module(self, scheme: Scheme) -> "VAEModule":
        return VAEModule(self, scheme)


class VAEModule(nn.Module):
    def __init__(self, spec: VAE, scheme: Scheme = "fan_in"):
        super().__init__()
        self.spec = spec
        self.encoder = spec.encoder.build(spec.values, 2 * spec.latent)
        self.decoder = spec.decoder.build(spec.latent, spec.values)
        self.output = ACTIVATIONS[spec.output]
        initialize(self, 1, scheme)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, *shape) and ε (B, latent) -> the reconstruction (B, *shape), μ and log σ² (B, latent)."""
        mean, log_variance = self.posterior(x)
        z = mean + (log_variance / 2).exp() * noise
        return self.decode(z), mean, log_variance

    def posterior(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """μ and log σ² of the codes (B, latent)."""
        mean, log_variance = self.encoder(x.flatten(1)).chunk(2, -1)
        return mean, log_variance

    def encode(self, x: Tensor) -> Tensor:
        return self.posterior(x)[0]  # (B, latent)

    def decode(self, z: Tensor) -> Tensor:
        return self.output(self.decoder(z)).unflatten(-1, self.spec.shape)  # (B, *shape)
