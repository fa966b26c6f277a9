"""The losses of a GAN, in two phases that alternate: in each, one network is trained and the other is frozen.

    V(D, G) = E log D(x) + E log(1 - D(G(z)))          D = sigmoid(d); D maximizes V

    phase           saturating        non_saturating      wasserstein
    discriminator   -V                -V                  E d(G(z)) - E d(x) + λ E (‖∇d(x̂)‖ - 1)²
    generator       E log(1 - D(G))   -E log D(G)         -E d(G(z))

log(1 - D(G)) is flat where D rejects samples with certainty: its gradient with respect to the logit is D. That of
-log D(G) is 1 - D (Goodfellow et al. 2014). The Wasserstein critic d has no sigmoid, and a penalty keeps the norm of
its gradient near 1 on the lines between data and samples: x̂ = u x + (1 - u) G(z) (Gulrajani et al. 2017).

Every step of the loop is one phase: `critic_steps` of the discriminator, then one of the generator. The phase follows
from the number of the step, so a resumed run goes on in the phase in which it was interrupted.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.data.packing import Item
from regard.models.base import Model
from regard.models.generative.gan import GAN
from regard.objectives.base import Columns, LossResult, TrainingPhase, require_model
from regard.objectives.generative import WithCodes
from regard.spec import require
from regard.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Adversarial(WithCodes):
    alternates: ClassVar[bool] = True
    trained: ClassVar[tuple[str, ...]] = ("discriminator.*", "generator.*")

    loss: Literal["saturating", "non_saturating", "wasserstein"] = "non_saturating"
    critic_steps: int = 1  # steps of the discriminator per step of the generator
    penalty: float = 10.0  # weight λ of the gradient penalty of the Wasserstein loss

    def check(self) -> None:
        require(self.critic_steps > 0, f"gan: critic_steps={self.critic_steps} must be positive")
        require(self.penalty >= 0, f"gan: penalty={self.penalty} must not be negative")

    def check_model(self, model: Model) -> None:
        require_model(self, model, isinstance(model, GAN), "a gan")
        assert isinstance(model, GAN)
        self.check_latent(model)

    def sample(self, columns: Columns, tokenizer: Tokenizer, length: int, rng: np.random.Generator) -> list[Item]:
        [item] = super().sample(columns, tokenizer, length, rng)
        return [{**item, "mix": rng.random((), np.float32)}] if self.loss == "wasserstein" else [item]

    def phase(self, step: int) -> TrainingPhase:
        if step % (self.critic_steps + 1) < self.critic_steps:
            return TrainingPhase(self.discriminator_loss, "discriminator.*")
        return TrainingPhase(self.generator_loss, "generator.*")

    def __call__(self, model: nn.Module, batch: Batch) -> LossResult:
        """The loss of the discriminator, which evaluations report."""
        return self.discriminator_loss(model, batch)

    def discriminator_loss(self, model: Any, batch: Batch) -> LossResult:
        """Needs data (B, *shape) and noise (B, latent); for the Wasserstein loss also mix (B,)."""
        with torch.no_grad():
            samples = model.decode(batch.noise)
        real, fake = model.score(batch.data), model.score(samples)  # (B,)
        if self.loss == "wasserstein":
            distance = (real - fake).sum()
            loss, metrics = -distance, {"distance": distance.detach()}
            if torch.is_grad_enabled():
                penalty = gradient_penalty(model, batch.data, samples, batch.mix).sum()
                loss, metrics = loss + self.penalty * penalty, metrics | {"penalty": penalty.detach()}
        else:
            loss = (F.softplus(-real) + F.softplus(fake)).sum()  # -log D(x) - log(1 - D(G(z)))
            metrics = {"discriminator_accuracy": ((real > 0).sum() + (fake <= 0).sum()) / 2}
        return loss, loss.new_tensor(len(real)), {"discriminator_loss": loss.detach(), **metrics}

    def generator_loss(self, model: Any, batch: Batch) -> LossResult:
        """Needs noise (B, latent); the data are not read."""
        fake = model.score(model.decode(batch.noise))  # (B,)
        match self.loss:
            case "saturating":
                loss = -F.softplus(fake).sum()  # log(1 - D(G(z)))
            case "non_saturating":
                loss = F.softplus(-fake).sum()  # -log D(G(z))
            case "wasserstein":
                loss = -fake.sum()
        return loss, loss.new_tensor(len(fake)), {"generator_loss": loss.detach()}


def gradient_penalty(model: Any, values: Tensor, samples: Tensor, mix: Tensor) -> Tensor:
    """(‖∇d(x̂)‖ - 1)² of every row (B,), where x̂ is `mix` parts of the values and the rest of the samples."""
    mix = mix.view(-1, *[1] * (values.dim() - 1))
    points = (mix * values + (1 - mix) * samples).requires_grad_()
    gradient = torch.autograd.grad(model.score(points).sum(), points, create_graph=True)[0]
    return (gradient.flatten(1).norm(dim=1) - 1).square()
