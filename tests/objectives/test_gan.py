"""GANs: identities of the value function, gradients and phases of the losses, and the penalties of the critic."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal

from regard.data.batch import Batch
from regard.models.generative.base import MLP
from regard.models.generative.gan import GAN
from regard.models.heads import Dense
from regard.objectives.base import phase_of
from regard.objectives.gan import Adversarial, gradient_penalty
from regard.objectives.reconstruction import Reconstruction

TANH = MLP((16,), Dense("tanh"))
GRID = torch.linspace(-30, 30, 60_001, dtype=torch.float64)


def integral(values: Tensor) -> float:
    return float(torch.trapezoid(values, GRID))


def wide(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def unit_gaussian(mean: float) -> Tensor:
    """The logarithm of the density on the grid."""
    return Normal(wide(mean), wide(1.0)).log_prob(GRID)


def points(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def jsd(p: Tensor, q: Tensor) -> float:
    """The Jensen-Shannon divergence of two densities on the grid, in nats."""
    middle = torch.logaddexp(p, q) - math.log(2)
    return sum(integral(density.exp() * (density - middle)) for density in (p, q)) / 2


def value_of(logits: Tensor, p: Tensor, q: Tensor) -> float:
    """V(D, G) = E log D(x) + E log(1 - D(G(z))); logits: those of D on the grid."""
    return integral(p.exp() * F.logsigmoid(logits) + q.exp() * F.logsigmoid(-logits))


@pytest.mark.ledger("gan.optimal")
@pytest.mark.parametrize("shift", [-0.3, 0.1, 0.4])
def test_the_best_discriminator_is_the_share_of_the_data(shift: float) -> None:
    p, q = unit_gaussian(-1.0), unit_gaussian(0.7)
    best = p - q
    assert (torch.sigmoid(best) - p.exp() / (p.exp() + q.exp())).abs().nan_to_num(0).max() < 1e-9
    assert value_of(best + shift * torch.sin(GRID), p, q) < value_of(best, p, q)


@pytest.mark.ledger("gan.optimal")
def test_a_trained_discriminator_approaches_the_best_one() -> None:
    """For Gaussians at ±1 the logit of D* is -2x; a linear discriminator trained by the objective finds it."""
    torch.manual_seed(0)
    model = GAN((1,), 1, generator=MLP(()), discriminator=MLP(())).build(0).double()
    with torch.no_grad():  # G(z) = z + 1
        model.generator.out.weight.fill_(1.0)
        model.generator.out.bias.fill_(1.0)
    batch = Batch(data=torch.randn(20_000, 1).double() - 1, noise=torch.randn(20_000, 1).double())
    optimizer = torch.optim.LBFGS(model.discriminator.parameters(), max_iter=50)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss, count, _ = Adversarial().phase(0).loss(model, batch)
        (loss / count).backward()
        return loss / count

    optimizer.step(closure)
    x = torch.linspace(-2, 2, 9).double().unsqueeze(1)
    with torch.no_grad():
        found = torch.sigmoid(model.score(x))
    assert (found - torch.sigmoid(-2 * x.squeeze(1))).abs().max() < 0.02


@pytest.mark.ledger("gan.jsd")
@pytest.mark.parametrize("distance", [0.0, 0.5, 2.0, 3.82])
def test_the_value_of_the_best_discriminator_is_a_divergence(distance: float) -> None:
    p, q = unit_gaussian(0.0), unit_gaussian(distance)
    value = value_of(p - q, p, q)
    assert abs(value - (-math.log(4) + 2 * jsd(p, q))) < 1e-9
    assert (abs(value + math.log(4)) < 1e-9) == (distance == 0)


@pytest.mark.ledger("gan.jsdfig")
def test_the_divergence_of_two_unit_gaussians_in_bits() -> None:
    assert round(jsd(unit_gaussian(0.0), unit_gaussian(3.82)) / math.log(2), 3) == 0.893
    assert abs(jsd(unit_gaussian(0.0), unit_gaussian(0.0))) < 1e-15
    assert abs(jsd(unit_gaussian(-14.0), unit_gaussian(14.0)) / math.log(2) - 1) < 1e-9


def gan(**options) -> nn.Module:
    return GAN((2,), 3, generator=TANH, discriminator=TANH, **options).build(0).double()


def gan_batch(rows: int = 6) -> Batch:
    noise = torch.randn(rows, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return Batch(data=points(rows), noise=noise, mix=torch.linspace(0, 1, rows, dtype=torch.float64))


@pytest.mark.ledger("gan.value", "gan.model")
def test_the_value_is_two_cross_entropies_with_the_sign_changed() -> None:
    model, batch = gan(), gan_batch()
    real, fake = torch.sigmoid(model.score(batch.data)), torch.sigmoid(model.score(model(batch.noise)))
    value = real.log().sum() + (1 - fake).log().sum()
    loss, count, metrics = Adversarial().phase(0).loss(model, batch)
    assert count == 6 and abs(loss + value) < 1e-12
    entropies = F.binary_cross_entropy(real, torch.ones_like(real), reduction="sum")
    entropies += F.binary_cross_entropy(fake, torch.zeros_like(fake), reduction="sum")
    assert abs(loss - entropies) < 1e-12
    assert metrics["discriminator_accuracy"] == ((real > 0.5).sum() + (fake <= 0.5).sum()) / 2
    saturating = Adversarial(loss="saturating").phase(1).loss(model, batch)[0]
    assert abs(saturating - (1 - fake).log().sum()) < 1e-12
    assert abs(Adversarial().phase(1).loss(model, batch)[0] + fake.log().sum()) < 1e-12


@pytest.mark.ledger("gan.value")
def test_the_generator_learns_from_the_discriminator_alone() -> None:
    """Given the discriminator, its gradient does not depend on the data; without a discriminator's slope it is zero."""
    model, batch = gan(), gan_batch()
    phase = Adversarial().phase(1)
    assert phase.trains == "generator.*"
    weights = list(model.generator.parameters())
    first = torch.autograd.grad(phase.loss(model, batch)[0], weights)
    other = torch.autograd.grad(phase.loss(model, Batch(data=100 * batch.data, noise=batch.noise))[0], weights)
    assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert any(a.abs().max() > 0 for a in first)
    nn.init.zeros_(model.discriminator.out.weight)
    blind = torch.autograd.grad(phase.loss(model, batch)[0], weights)
    assert all(a.abs().max() == 0 for a in blind)


def test_the_phase_of_the_discriminator_has_no_gradient_in_the_generator() -> None:
    model, batch = gan(), gan_batch()
    for loss in ("saturating", "non_saturating", "wasserstein"):
        phase = Adversarial(loss=loss).phase(0)
        assert phase.trains == "discriminator.*"
        phase.loss(model, batch)[0].backward()
        assert all(p.grad is None for p in model.generator.parameters())
        assert all(p.grad is not None for p in model.discriminator.parameters() if p.ndim == 2)


@pytest.mark.ledger("gan.nonsat")
@pytest.mark.parametrize("probability", [0.001, 0.5, 0.9])
def test_the_slopes_of_both_losses_of_the_generator(probability: float) -> None:
    """With respect to the logit of D: -D of the saturating loss, -(1 - D) of the other; at D = 0.001 999 times more."""
    slopes = {}
    for loss in ("saturating", "non_saturating"):
        logit = torch.logit(torch.tensor([probability], dtype=torch.float64)).requires_grad_()
        Adversarial(loss=loss).phase(1).loss(FixedScore(logit), Batch(noise=torch.zeros(1, 3)))[0].backward()
        assert logit.grad is not None
        slopes[loss] = float(logit.grad)
    assert abs(slopes["saturating"] + probability) < 1e-12
    assert abs(slopes["non_saturating"] + 1 - probability) < 1e-12


class FixedScore(nn.Module):
    """A GAN whose discriminator has given logits."""

    def __init__(self, logits: Tensor):
        super().__init__()
        self.logits = logits

    def decode(self, z: Tensor) -> Tensor:
        return z

    def score(self, x: Tensor) -> Tensor:
        return self.logits


@pytest.mark.ledger("gan.wgan")
def test_the_gradient_penalty_of_a_linear_critic() -> None:
    """The gradient of a linear critic is its weight everywhere."""
    model = GAN((2,), 3, discriminator=MLP(())).build(0).double()
    batch, weight = gan_batch(), model.discriminator.out.weight
    expected = (weight.norm() - 1).square()
    assert (gradient_penalty(model, batch.data, model(batch.noise), batch.mix) - expected).abs().max() < 1e-12
    loss, count, metrics = Adversarial(loss="wasserstein", penalty=3.0).phase(0).loss(model, batch)
    difference = (model.score(batch.data) - model.score(model(batch.noise))).sum()
    assert abs(loss - (3 * 6 * expected - difference)) < 1e-12
    assert abs(metrics["penalty"] - 6 * expected) < 1e-12 and abs(metrics["distance"] - difference) < 1e-12
    with torch.no_grad():  # an evaluation reports the distance without the penalty
        assert abs(Adversarial(loss="wasserstein")(model, batch)[0] + difference) < 1e-12
    generator = Adversarial(loss="wasserstein").phase(1).loss(model, batch)[0]
    assert abs(generator + model.score(model(batch.noise)).sum()) < 1e-12


@pytest.mark.ledger("gan.wgan")
@pytest.mark.parametrize("penalty", [10.0, 100.0])
def test_a_critic_trained_with_the_penalty_has_slopes_near_one(penalty: float) -> None:
    """Data and samples are 4.24 apart: the slope s that maximizes 4.24 s - λ (s - 1)² is 1 + 4.24 / 2λ."""
    torch.manual_seed(0)
    model = GAN((2,), 3, discriminator=MLP((32, 32))).build(0)
    objective = Adversarial(loss="wasserstein", penalty=penalty)
    optimizer = torch.optim.Adam(model.discriminator.parameters(), 3e-3)
    for _ in range(300):
        batch = Batch(data=torch.randn(64, 2) + 3, noise=torch.randn(64, 3), mix=torch.rand(64))
        loss, count, _ = objective.phase(0).loss(model, batch)
        optimizer.zero_grad()
        (loss / count).backward()
        optimizer.step()
    with torch.no_grad():
        samples = model(batch.noise)
    points = (batch.mix.unsqueeze(1) * batch.data + (1 - batch.mix.unsqueeze(1)) * samples).requires_grad_()
    slopes = torch.autograd.grad(model.score(points).sum(), points)[0].norm(dim=1)
    assert abs(slopes.mean() - (1 + math.sqrt(18) / (2 * penalty))) < 0.03


@pytest.mark.parametrize("critic_steps", [1, 3])
def test_phases_follow_from_the_step(critic_steps: int) -> None:
    objective = Adversarial(critic_steps=critic_steps)
    trained = [phase_of(objective, step).trains for step in range(2 * (critic_steps + 1))]
    assert trained == 2 * ([*["discriminator.*"] * critic_steps, "generator.*"])


def test_other_objectives_train_everything_in_every_step() -> None:
    def loss(model: nn.Module, batch: Batch):
        return torch.zeros(()), torch.ones(()), {}

    assert phase_of(Reconstruction(), 1).trains == phase_of(loss, 0).trains == "*"
    assert phase_of(loss, 0).loss is loss


@pytest.mark.ledger("gan.spectral")
@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (1, 4)])
def test_spectral_norm_has_a_largest_singular_value_of_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    rows, columns = shape
    layer = MLP((), spectral_norm=True).build(columns, rows).double().out
    x = torch.eye(columns).double()
    matrix = (layer(x) - layer(torch.zeros_like(x))).T
    assert abs(torch.linalg.svdvals(matrix)[0] - 1) < 1e-12
    theirs = nn.utils.parametrizations.spectral_norm(nn.Linear(columns, rows).double(), n_power_iterations=300)
    with torch.no_grad():
        theirs.parametrizations.weight.original.copy_(layer.weight)
    assert (theirs.train().weight - matrix).abs().max() < 1e-9
