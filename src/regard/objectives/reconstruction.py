"""Reconstruct the input: the losses of autoencoders and of variational autoencoders.

    reconstruction    Σ_x ‖x - g(f(x + s ε))‖², ε ~ N(0, I)
    vae               Σ_x ‖x - x̂‖² + β KL(N(μ, σ²) ‖ N(0, I))          KL = ½ Σ_j (μ_j² + σ_j² - log σ_j² - 1)

With `noise` s > 0, the input of an autoencoder is corrupted and the target is not: it learns to remove noise (Vincent
et al. 2008). With β = 1 the loss of a variational autoencoder is, but for a constant, the negative evidence lower bound
of a Gaussian decoder with variance ½ (Kingma & Welling 2014; β: Higgins et al. 2017). The reconstruction pulls codes
apart and σ to 0; the KL pulls all codes to N(0, I), from which samples are decoded.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.data.packing import Item
from regard.models.base import Model
from regard.models.generative.autoencoder import Autoencoder
from regard.models.generative.vae import VAE
from regard.objectives.base import Columns, LossResult, require_model
from regard.objectives.generative import GenerativeObjective, WithCodes
from regard.spec import require
from regard.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Reconstruction(GenerativeObjective):
    noise: float = 0.0  # standard deviation of the noise on the input

    def check(self) -> None:
        require(self.noise >= 0, f"reconstruction: noise={self.noise} must not be negative")

    def check_model(self, model: Model) -> None:
        require_model(self, model, isinstance(model, Autoencoder), "an autoencoder")

    def sample(self, columns: Columns, tokenizer: Tokenizer, length: int, rng: np.random.Generator) -> list[Item]:
        if not self.noise:
            return [columns]
        noise = rng.standard_normal(columns["data"].shape, np.float32)
        return [{**columns, "corrupted": columns["data"] + np.float32(self.noise) * noise}]

    def __call__(self, model: nn.Module, batch: Batch) -> LossResult:
        """Needs data (B, *shape), and for denoising also corrupted (B, *shape)."""
        loss = squared_error(model(batch.get("corrupted", batch.data)), batch.data).sum()
        return loss, loss.new_tensor(batch.size), {}


def squared_error(reconstructed: Tensor, data: Tensor) -> Tensor:
    """‖x - x̂‖² of every row (B,)."""
    return (reconstructed - data).flatten(1).square().sum(1)


@dataclass(frozen=True)
class Variational(WithCodes):
    beta: float = 1.0  # weight of the KL

    def check(self) -> None:
        require(self.beta >= 0, f"vae: beta={self.beta} must not be negative")

    def check_model(self, model: Model) -> None:
        require_model(self, model, isinstance(model, VAE), "a vae")
        assert isinstance(model, VAE)
        self.check_latent(model)

    def __call__(self, model: nn.Module, batch: Batch) -> LossResult:
        """Needs data (B, *shape), and noise (B, latent)."""
        reconstructed, mean, log_variance = model(batch.data, batch.noise)
        error = squared_error(reconstructed, batch.data).sum()
        divergence = gaussian_kl(mean, log_variance).sum()
        metrics = {"reconstruction": error.detach(), "kl": divergence.detach()}
        return error + self.beta * divergence, error.new_tensor(len(mean)), metrics


def gaussian_kl(mean: Tensor, log_variance: Tensor) -> Tensor:
    """KL(N(μ, σ²) ‖ N(0, I)) in nats, summed over the last dimension."""
    return 0.5 * (mean.square() + log_variance.exp() - log_variance - 1).sum(-1)
