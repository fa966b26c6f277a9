"""Autoencoders and variational autoencoders: losses, identities, gradients; what generative objectives refuse."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from regard.data.batch import Batch
from regard.data.loader import Loader
from regard.data.sources.base import Generated, Splits
from regard.data.sources.points import PlanePoints
from regard.models.generative.autoencoder import Autoencoder
from regard.models.generative.base import MLP
from regard.models.generative.gan import GAN
from regard.models.generative.vae import VAE
from regard.models.heads import Dense
from regard.objectives.gan import Adversarial
from regard.objectives.reconstruction import Reconstruction, Variational, gaussian_kl
from regard.spec import SpecError
from regard.text import train as tokenizers

TANH = MLP((16,), Dense("tanh"))


def wide(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def coded_batch() -> Batch:
    noise = torch.randn(6, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return Batch(data=points(6), noise=noise)


def points(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_an_example_of_another_shape_is_shown() -> None:
    objective, tokenizer = Reconstruction(), tokenizers.byte()
    rows = [[objective.tokenize({"point": values}, tokenizer)] for values in ([1.0, 2.0], [3.0, 4.0, 5.0])]
    with pytest.raises(ValueError, match=r"the example \[3.0, 4.0, 5.0\] has the shape \(3,\), and another one \(2,\)"):
        objective.collate(rows, tokenizer, 1)


@pytest.mark.ledger("ae.model")
def test_the_loss_of_an_autoencoder_is_the_squared_error() -> None:
    model = Autoencoder((2,), 1, encoder=TANH, decoder=TANH).build(0).double()
    data = points(5)
    loss, count, _ = Reconstruction()(model, Batch(data=data))
    expected = sum((x - model.decode(model.encode(x.unsqueeze(0)))[0]).square().sum() for x in data)
    assert count == 5 and abs(loss - expected) < 1e-12
    noisy = data + 0.1
    loss, _, _ = Reconstruction(noise=0.5)(model, Batch(data=data, corrupted=noisy))
    assert abs(loss - (data - model(noisy)).square().sum()) < 1e-12, "the target has no noise"


@pytest.mark.ledger("ae.uses")
def test_a_linear_autoencoder_spans_the_principal_components() -> None:
    torch.manual_seed(0)
    scales = wide(5.0, 3.0, 2.0, 1.0, 0.5, 0.2)
    rotation = torch.linalg.qr(torch.randn(6, 6).double())[0]
    data = (torch.randn(400, 6).double() * scales) @ rotation.T
    data -= data.mean(0)
    model = Autoencoder((6,), 3, encoder=MLP(()), decoder=MLP(())).build(0).double()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=400, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss, count, _ = Reconstruction()(model, Batch(data=data))
        (loss / count).backward()
        return loss / count

    optimizer.step(closure)
    components = torch.linalg.svd(data, full_matrices=False)[2][:3]  # (3, 6)
    decoder = torch.linalg.qr(model.decoder.out.weight.detach())[0]  # (6, 3)
    cosines = torch.linalg.svdvals(components @ decoder)  # of the angles between both subspaces
    assert (1 - cosines).abs().max() < 1e-6
    variance = torch.linalg.svdvals(data).square()
    assert abs(closure().detach() - variance[3:].sum() / 400) < 1e-6, "the error is the variance that is left out"


@pytest.mark.ledger("ae.fig")
@pytest.mark.parametrize(("shape", "saved"), [((1, 8, 8), 0.94), ((1, 28, 28), 0.995)])
def test_the_compression_follows_from_the_size_of_the_input(shape: tuple[int, ...], saved: float) -> None:
    """Four numbers save 94 % of 64 values, and 99.5 % of 784."""
    assert round(Autoencoder(shape, 4).compression, 3 if saved == 0.995 else 2) == saved


@pytest.mark.ledger("vae.kl")
@pytest.mark.parametrize(("mean", "deviation"), [(0.0, 1.0), (1.5, 0.3), (-2.0, 2.5)])
def test_the_closed_form_of_the_divergence(mean: float, deviation: float) -> None:
    mu, log_variance = wide(mean), wide(2 * math.log(deviation))
    closed = float(gaussian_kl(mu, log_variance))
    q, p = Normal(wide(mean), wide(deviation)), Normal(wide(0.0), wide(1.0))
    assert abs(closed - float(kl_divergence(q, p))) < 1e-12
    grid = torch.linspace(mean - 40 * deviation, mean + 40 * deviation, 400_001, dtype=torch.float64)
    log_q, log_p = q.log_prob(grid), p.log_prob(grid)
    assert abs(closed - float(torch.trapezoid(log_q.exp() * (log_q - log_p), grid))) < 1e-9


@pytest.mark.ledger("vae.kl")
def test_the_divergence_is_zero_at_the_prior_and_unbounded_without_variance() -> None:
    zero = torch.zeros(1).double()
    assert float(gaussian_kl(zero, zero)) == 0
    deviations = wide(1e-12, 1e-6, 1e-3, 0.1, 0.9, 1.0, 1.1, 5.0)
    values = gaussian_kl(torch.zeros(8, 1).double(), 2 * deviations.log().unsqueeze(1))
    assert int(values.argmin()) == 5
    assert (values[:5].diff() < 0).all() and (values[5:].diff() > 0).all()
    assert abs(values[0] - (-math.log(1e-12) - 0.5)) < 1e-9, "it grows like -log σ"


@pytest.mark.ledger("vae.klfig")
def test_the_divergence_of_the_figure() -> None:
    """μ = 1.10 and σ = 0.52 in two dimensions: 0.894 in each, 1.79 together."""
    one = gaussian_kl(wide(1.10), wide(2 * math.log(0.52)))
    assert round(float(one), 3) == 0.894 and round(2 * float(one), 2) == 1.79
    low = gaussian_kl(wide(1.095), wide(2 * math.log(0.525)))
    assert 2 * float(low) < 1.785, "1.78 is within the rounding of both numbers"


@pytest.mark.ledger("vae.model")
def test_the_loss_of_a_variational_autoencoder() -> None:
    model = VAE((2,), 3, encoder=TANH, decoder=TANH).build(0).double()
    batch = coded_batch()
    mean, log_variance = model.posterior(batch.data)
    z = mean + (log_variance / 2).exp() * batch.noise
    error = (batch.data - model.decode(z)).square().sum()
    divergence = sum(kl_divergence(Normal(m, (v / 2).exp()), Normal(wide(0.0), wide(1.0))).sum()
                     for m, v in zip(mean, log_variance, strict=True))  # fmt: skip
    loss, count, metrics = Variational(beta=0.4)(model, batch)
    assert count == 6 and abs(loss - (error + 0.4 * divergence)) < 1e-9
    assert abs(metrics["reconstruction"] - error) < 1e-9 and abs(metrics["kl"] - divergence) < 1e-9


@pytest.mark.ledger("vae.model")
def test_gradients_reach_the_mean_and_the_variance_through_the_noise() -> None:
    model = VAE((2,), 3, encoder=MLP(()), decoder=TANH).build(0).double()
    batch = coded_batch()

    def loss(weight: Tensor) -> Tensor:
        outputs = torch.func.functional_call(model, {"encoder.out.weight": weight}, (batch.data, batch.noise))
        return (outputs[0] - batch.data).square().sum() + 0.4 * gaussian_kl(*outputs[1:]).sum()

    weight = model.encoder.out.weight.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(loss, (weight,), fast_mode=True)
    gradient = torch.autograd.grad(loss(weight), weight)[0]
    assert (gradient.norm(dim=1) > 1e-3).all(), "rows of μ and of log σ²"


@pytest.mark.ledger("vae.model")
def test_the_gradient_through_the_noise_agrees_with_the_score_function() -> None:
    """∇ E f(z), z ~ N(μ, σ²), by both estimates from 400,000 draws; the first has the smaller spread."""
    torch.manual_seed(0)
    parameters = wide(0.7, math.log(0.6)).requires_grad_()
    noise = torch.randn(400_000).double()
    mean, deviation = parameters[0], parameters[1].exp()

    def f(z: Tensor) -> Tensor:
        return z.square() + torch.sin(z)

    through = torch.stack(
        [
            (2 * (mean + deviation * noise) + torch.cos(mean + deviation * noise)),
            (2 * (mean + deviation * noise) + torch.cos(mean + deviation * noise)) * deviation * noise,
        ]
    ).detach()
    [pathwise] = torch.autograd.grad(f(mean + deviation * noise).mean(), parameters)
    assert (pathwise - through.mean(1)).abs().max() < 1e-9
    z = (mean + deviation * noise).detach()
    standardized = (z - mean) / deviation
    scores = (f(z) * torch.stack([standardized / deviation, standardized.square() - 1])).detach()
    spread = scores.std(1) / math.sqrt(len(noise))
    assert ((pathwise - scores.mean(1)).abs() < 4 * spread).all()
    assert (through.std(1) < scores.std(1)).all()


@pytest.mark.ledger("vae.model")
def test_samples_come_from_the_decoder_alone() -> None:
    model = VAE((2,), 3, encoder=TANH, decoder=TANH).build(0)
    z = torch.randn(4, 3)
    before = model.decode(z)
    for parameter in model.encoder.parameters():
        nn.init.constant_(parameter, math.nan)
    assert torch.equal(model.decode(z), before)


def test_the_batches_of_a_loader_have_noise_that_follows_from_the_index() -> None:
    objective = Adversarial(loss="wasserstein").fit(PlanePoints().open(), GAN((2,), 3))
    batches = [next(Loader(PlanePoints().open().train, objective, tokenizers.byte(), 8, 1)) for _ in range(2)]
    assert batches[0].fields == ("data", "noise", "mix") and batches[0].noise.shape == (8, 3)
    assert all(torch.equal(batches[0][name], batches[1][name]) for name in batches[0])
    assert len(batches[0].noise.unique()) == 24


@pytest.mark.parametrize(
    ("model", "example", "message"),
    [
        (Autoencoder((1, 8, 8), 2), {"point": np.zeros(2)}, r"have the shape \(2,\), and the model takes \(1, 8, 8\)"),
        (Autoencoder((2,), 2), {"text": "a"}, "an example needs an image or a point; this one is"),
    ],
)
def test_data_of_another_shape_are_refused(model: Autoencoder, example: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Reconstruction().fit(Splits(Generated("test", lambda _: example), None), model)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Reconstruction(noise=-1.0), "noise=-1.0 must not be negative"),
        (lambda: Variational(beta=-1.0), "beta=-1.0 must not be negative"),
        (lambda: Adversarial(critic_steps=0), "critic_steps=0 must be positive"),
        (lambda: Adversarial(penalty=-1.0), "penalty=-1.0 must not be negative"),
        (lambda: Adversarial(latent=2).check_model(GAN((2,), 3)), "latent=2, but the codes of the model have 3"),
        (lambda: VAE((), 3), r"shape=\(\) needs a positive size per dimension"),
        (lambda: GAN((2,), 0), "latent=0 must be positive"),
        (lambda: MLP((4, 0)), r"hidden=\(4, 0\) must be positive"),
        (lambda: PlanePoints(density="grid", modes=5), "a grid of modes=5 is not a square; choose 4, 9, 16 or 25"),
        (lambda: PlanePoints(noise=-1.0), "noise=-1.0 must not be negative"),
    ],
)
def test_wrong_settings_are_refused(make, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make()
