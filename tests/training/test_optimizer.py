"""AdamW against its equation, the parameters with weight decay, and its state by name."""

from dataclasses import replace

import pytest
import torch

from regard.checkpoint.atomic_folder import CheckpointError
from regard.parts.body import Body
from regard.parts.ssm.mamba import Mamba
from regard.parts.ssm.s4 import S4D
from regard.spec import SpecError
from regard.training.optimizer import AdamW, decay_groups, load_optimizer_state, optimizer_state
from tests.training.tiny import SPEC


def model(tied: bool = True) -> torch.nn.Module:
    return replace(SPEC, tied=tied).build(seed=0).double()


@pytest.mark.parametrize("tied", [True, False])
def test_only_matrices_have_weight_decay(tied: bool) -> None:
    decayed, not_decayed = ({name for name, _ in group} for group in decay_groups(model(tied)))
    assert decayed | not_decayed == {name for name, _ in model(tied).named_parameters()}
    assert not decayed & not_decayed
    assert all(name.endswith("_proj.weight") or name == "head.weight" for name in decayed)
    assert all(name == "embedding.weight" or "norm" in name or name.endswith("bias") for name in not_decayed)
    assert ("head.weight" in decayed) == (not tied)


class PartWithRates(torch.nn.Module):
    """A user-defined part with a matrix that weight decay must not change."""

    no_weight_decay = ("rates",)

    def __init__(self) -> None:
        super().__init__()
        self.rates = torch.nn.Parameter(torch.zeros(4, 3))
        self.proj = torch.nn.Linear(4, 3)


def test_a_part_excludes_parameters_from_weight_decay() -> None:
    decayed, not_decayed = ([name for name, _ in group] for group in decay_groups(torch.nn.Sequential(PartWithRates())))
    assert decayed == ["0.proj.weight"] and not_decayed == ["0.rates", "0.proj.bias"]
    part = PartWithRates()
    part.no_weight_decay = ("rate",)
    with pytest.raises(AttributeError, match="names rate; its parameters are rates"):
        decay_groups(part)


@pytest.mark.parametrize("body", [Mamba(), S4D(state=4)])
def test_decay_rates_of_state_spaces_have_no_weight_decay(body: Body) -> None:
    decayed, not_decayed = ({name.rpartition(".")[2] for name, _ in group} for group in decay_groups(body.build(8)))
    rates = {"A_log", "log_step", "log_decay", "turn"}
    assert not_decayed & rates and not decayed & rates


def test_frozen_weights_are_not_optimized() -> None:
    frozen = model().requires_grad_(False)
    with pytest.raises(SpecError, match="no trainable parameter"):
        decay_groups(frozen)
    frozen.norm.requires_grad_(True)
    assert [[name for name, _ in group] for group in decay_groups(frozen)] == [[], ["norm.weight"]]
    assert len(AdamW().build(frozen, 1.0).param_groups) == 1


def test_three_steps_equal_the_equation() -> None:
    spec, lr = AdamW(beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.3), 0.01
    trained = model()
    weights = {name: p.detach().clone() for name, p in trained.named_parameters()}
    decayed = {name for name, _ in decay_groups(trained)[0]}
    m = {name: torch.zeros_like(w) for name, w in weights.items()}
    v = {name: torch.zeros_like(w) for name, w in weights.items()}
    optimizer = spec.build(trained, lr)
    for t in range(1, 4):
        for name, p in trained.named_parameters():
            g = p.grad = torch.randn_like(p)
            m[name] = 0.8 * m[name] + 0.2 * g
            v[name] = 0.9 * v[name] + 0.1 * g**2
            step = (m[name] / (1 - 0.8**t)) / ((v[name] / (1 - 0.9**t)).sqrt() + 1e-3)
            weights[name] -= lr * (step + (0.3 if name in decayed else 0.0) * weights[name])
        optimizer.step()
    for name, p in trained.named_parameters():
        assert (p - weights[name]).abs().max() < 1e-12, name


def test_state_is_saved_by_name_and_restored_exactly() -> None:
    first, second = model(), model()
    first_optimizer, second_optimizer = AdamW().build(first, 0.1), AdamW().build(second, 0.1)
    gradients = [torch.randn_like(p) for p in first.parameters()]

    def step(trained: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for p, g in zip(trained.parameters(), gradients, strict=True):
            p.grad = g.clone()
        optimizer.step()

    step(first, first_optimizer)
    state = {name: tensor.clone() for name, tensor in optimizer_state(first_optimizer).items()}
    assert "stack.blocks.0.sublayers.0.body.q_proj.weight/exp_avg_sq" in state
    second.load_state_dict(first.state_dict())
    load_optimizer_state(second_optimizer, dict(reversed(state.items())))
    step(first, first_optimizer)
    step(second, second_optimizer)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_state_of_another_model_is_refused() -> None:
    optimizer = AdamW().build(model(), 0.1)
    with pytest.raises(CheckpointError, match="'other.weight'"):
        load_optimizer_state(optimizer, {"other.weight/exp_avg": torch.zeros(1)})
