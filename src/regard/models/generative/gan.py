"""The generative adversarial network: a generator and a discriminator with opposite goals. Goodfellow et al. 2014.

    x̃ = G(z), z ~ N(0, I)          D(x) = sigmoid(d(x)), the probability that x is an example of the data

The generator never reads data: it learns from the gradient of the discriminator alone (objectives/gan.py). For a fixed
generator the best discriminator is p_data / (p_data + p_G), and with it the generator minimizes the Jensen-Shannon
divergence of both densities, which is zero only if they are equal; then D is ½ everywhere.

A GAN has no encoder: it draws samples, but it has no code of a given example. With the Wasserstein loss, d is a critic
whose values are no logits.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from regard.models.base import Scheme, initialize
from regard.models.generative.base import MLP, Generative
from regard.parts.feedforward import ACTIVATIONS


@dataclass(frozen=True)
class GAN(Generative["GANModule"]):
    """generator: the network from noise to an example; discriminator: the one from an example to its logit."""

    generator: MLP = MLP()
    discriminator: MLP = MLP()

    def module(self, scheme: Scheme) -> "GANModule":
        return GANModule(self, scheme)


class GANModule(nn.Module):
    def __init__(self, spec: GAN, scheme: Scheme = "fan_in"):
        super().__init__()
        self.spec = spec
        self.generator = spec.generator.build(spec.latent, spec.values)
        self.discriminator = spec.discriminator.build(spec.values, 1)
        self.output = ACTIVATIONS[spec.output]
        initialize(self, 1, scheme)

    def forward(self, z: Tensor) -> Tensor:
        return self.decode(z)

    def decode(self, z: Tensor) -> Tensor:
        return self.output(self.generator(z)).unflatten(-1, self.spec.shape)  # (B, *shape)

    def score(self, x: Tensor) -> Tensor:
        """d(x): the logit of the discriminator, or the score of a critic."""
        return self.discriminator(x.flatten(1)).squeeze(-1)  # (B,)
