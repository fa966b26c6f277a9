"""What α, the rank, the rates and the draw of A have to do with each other, by Adam's first steps."""

import pytest
import torch
from torch import Tensor, nn

from regard.adapt.lora import LoRA, LoRALinear

WIDE = 256


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def adapted(rank: int, alpha: float) -> LoRALinear:
    torch.manual_seed(1)
    return LoRALinear(nn.Linear(WIDE, WIDE, bias=False).double().requires_grad_(False), LoRA(rank, alpha))


def adam(layer: LoRALinear, rate_a: float = 1e-3, rate_b: float = 1e-3) -> torch.optim.Adam:
    groups = [{"params": [layer.lora_A.weight], "lr": rate_a}, {"params": [layer.lora_B.weight], "lr": rate_b}]
    return torch.optim.Adam(groups, eps=1e-40)  # none, but for A's first gradient, which is zero


def change(layer: LoRALinear) -> Tensor:
    return layer.scale * layer.lora_B.weight @ layer.lora_A.weight


@pytest.mark.ledger("lora.alpha")
def test_a_fixed_alpha_keeps_the_first_step_apart_from_the_rank() -> None:
    gradient = random(WIDE, WIDE, seed=0)

    def effect(rank: int, alpha: float) -> float:
        """How far the first step goes along the gradient of the weight."""
        layer = adapted(rank, alpha)
        optimizer = adam(layer)
        (change(layer) * gradient).sum().backward()
        optimizer.step()
        return -(change(layer) * gradient).sum().item()

    fixed = [effect(rank, 32.0) for rank in (4, 16, 64)]
    assert fixed == pytest.approx([fixed[0]] * 3, rel=0.06)
    twice = [effect(rank, 2.0 * rank) for rank in (4, 16, 64)]
    assert [later / first for first, later in zip(twice, twice[1:], strict=False)] == pytest.approx([4, 4], rel=0.06)


@pytest.mark.ledger("lwr.dof")
@pytest.mark.parametrize(("p", "q"), [(0.3, 5.0), (7.0, 0.11), (2.5, 2.5)])
def test_of_four_settings_two_are_free(p: float, q: float) -> None:
    """α/(pq), A drawn p times as wide, its rate times p, B's times q: the same run."""
    x, y = random(64, WIDE, seed=2), random(64, WIDE, seed=3)
    plain, other = adapted(4, 32.0), adapted(4, 32.0 / (p * q))
    with torch.no_grad():
        other.lora_A.weight.mul_(p)
    optimizers = [adam(plain, 1e-3, 2e-3), adam(other, 1e-3 * p, 2e-3 * q)]
    start = change(plain).detach()
    for _ in range(50):
        for layer, optimizer in zip((plain, other), optimizers, strict=True):
            optimizer.zero_grad()
            (layer(x) - y).square().mean().backward()
            optimizer.step()
        assert (change(plain) - change(other)).abs().max() < 1e-9
    assert (change(plain) - start).abs().max() > 0.01
