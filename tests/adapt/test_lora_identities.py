"""LoRA under Adam: how updates depend on α, the rank, the learning rates and the initial A."""

import pytest
import torch
from torch import Tensor, nn

from regard.adapt.lora import LoRA, LoRALinear

WIDTH = 256


def random_tensor(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def adapted_layer(rank: int, alpha: float) -> LoRALinear:
    torch.manual_seed(1)
    layer = LoRALinear(nn.Linear(WIDTH, WIDTH, bias=False).double().requires_grad_(False))
    layer.add("default", LoRA(rank, alpha), layer.base.weight)
    return layer


def adam(layer: LoRALinear, rate_a: float = 1e-3, rate_b: float = 1e-3) -> torch.optim.Adam:
    rates = {"A": rate_a, "B": rate_b}
    groups = [{"params": [layer.matrix(side, "default")], "lr": rate} for side, rate in rates.items()]
    return torch.optim.Adam(groups, eps=1e-40)  # almost zero: A's first gradient is zero, and 0 / 0 would be NaN


def delta_weight(layer: LoRALinear) -> Tensor:
    return layer.delta_weight("default")


@pytest.mark.ledger("lora.alpha")
def test_with_a_fixed_alpha_the_first_step_does_not_depend_on_the_rank() -> None:
    gradient = random_tensor(WIDTH, WIDTH, seed=0)

    def effect(rank: int, alpha: float) -> float:
        """The change of the weight along its gradient in the first step."""
        layer = adapted_layer(rank, alpha)
        optimizer = adam(layer)
        (delta_weight(layer) * gradient).sum().backward()
        optimizer.step()
        return -(delta_weight(layer) * gradient).sum().item()

    fixed = [effect(rank, 32.0) for rank in (4, 16, 64)]
    assert fixed == pytest.approx([fixed[0]] * 3, rel=0.06)
    proportional = [effect(rank, 2.0 * rank) for rank in (4, 16, 64)]
    ratios = [larger / smaller for smaller, larger in zip(proportional, proportional[1:], strict=False)]
    assert ratios == pytest.approx([4, 4], rel=0.06)


@pytest.mark.ledger("lwr.dof")
@pytest.mark.parametrize(("p", "q"), [(0.3, 5.0), (7.0, 0.11), (2.5, 2.5)])
def test_four_settings_have_two_degrees_of_freedom(p: float, q: float) -> None:
    """Dividing α by pq, and multiplying A and its learning rate by p and that of B by q, changes no update."""
    x, y = random_tensor(64, WIDTH, seed=2), random_tensor(64, WIDTH, seed=3)
    reference, rescaled = adapted_layer(4, 32.0), adapted_layer(4, 32.0 / (p * q))
    with torch.no_grad():
        rescaled.matrix("A", "default").mul_(p)
    optimizers = [adam(reference, 1e-3, 2e-3), adam(rescaled, 1e-3 * p, 2e-3 * q)]
    start = delta_weight(reference).detach()
    for _ in range(50):
        for layer, optimizer in zip((reference, rescaled), optimizers, strict=True):
            optimizer.zero_grad()
            (layer(x) - y).square().mean().backward()
            optimizer.step()
        assert (delta_weight(reference) - delta_weight(rescaled)).abs().max() < 1e-9
    assert (delta_weight(reference) - start).abs().max() > 0.01
