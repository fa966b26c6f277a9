"""Every optimizer against an independent implementation, its state by name, and exact resume."""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from regard.checkpoint.atomic_folder import CheckpointError
from regard.kinds import OPTIMIZERS
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.block import Block, Sublayer
from regard.parts.experts import Experts
from regard.parts.feedforward import SwiGLU
from regard.parts.latent_attention import LatentAttention
from regard.spec import SpecError
from regard.training.adafactor import Adafactor
from regard.training.muon import Muon, orthogonalize
from regard.training.optimizer import (
    SGD,
    AdamW,
    AdamW8bit,
    Optimizer,
    load_optimizer_state,
    optimizer_state,
    set_learning_rate,
)
from regard.training.parameter_groups import decay_groups, decayed_parameters, hidden_matrices
from tests.training.tiny import SETTINGS, SPEC, outcome, trainer

LR = 0.01
Weights = dict[str, Tensor]
Update = Callable[[Weights, Iterator[Weights], set[str]], None]
# Experts are stacked matrices (experts, out, in); a latent attention has one matrix per head.
STACKED = replace(
    SPEC,
    layers=(Repeat((Block((Sublayer(LatentAttention(2, 4, 4, 4, 4)), Sublayer(Experts(3, 2, SwiGLU(6))))),)),),
)


def model(tied: bool = True, spec: Decoder = SPEC) -> nn.Module:
    return replace(spec, tied=tied).build(seed=0).double()


def gradients(weights: Mapping[str, Tensor], steps: int) -> Iterator[Weights]:
    """The same gradients in every call, of different sizes."""
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        yield {
            name: torch.randn(w.shape, generator=generator, dtype=w.dtype) * 3.0 ** (step % 3 - 1)
            for name, w in weights.items()
        }


def weights_of(module: nn.Module) -> Weights:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def names_of(module: nn.Module, parameters: set[nn.Parameter]) -> set[str]:
    return {name for name, p in module.named_parameters() if p in parameters}


def take_steps(module: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterator[Weights]) -> None:
    for step in steps:
        for name, p in module.named_parameters():
            p.grad = step[name].clone()
        optimizer.step()


def adamw(weights: Weights, steps: Iterator[Weights], decayed: set[str]) -> None:
    m = {name: torch.zeros_like(w) for name, w in weights.items()}
    v = {name: torch.zeros_like(w) for name, w in weights.items()}
    for t, step in enumerate(steps, 1):
        for name in weights:
            m[name] = 0.8 * m[name] + 0.2 * step[name]
            v[name] = 0.9 * v[name] + 0.1 * step[name] ** 2
            update = (m[name] / (1 - 0.8**t)) / ((v[name] / (1 - 0.9**t)).sqrt() + 1e-3)
            weights[name] -= LR * (update + (0.3 if name in decayed else 0.0) * weights[name])


def sgd(weights: Weights, steps: Iterator[Weights], decayed: set[str]) -> None:
    buffers = {name: torch.zeros_like(w) for name, w in weights.items()}
    for step in steps:
        for name in weights:
            g = step[name] + (0.3 if name in decayed else 0.0) * weights[name]
            buffers[name] = 0.8 * buffers[name] + g
            weights[name] -= LR * (g + 0.8 * buffers[name])


def adafactor(**options: float | bool) -> Update:
    """The implementation of transformers."""

    def update(weights: Weights, steps: Iterator[Weights], decayed: set[str]) -> None:
        from transformers.optimization import Adafactor as Reference

        parameters = {name: nn.Parameter(w) for name, w in weights.items()}
        groups = [
            {"params": [p for name, p in parameters.items() if (name in decayed) == is_decayed], "weight_decay": decay}
            for is_decayed, decay in ((True, 0.3), (False, 0.0))
        ]
        optimizer = Reference(groups, **{"lr": LR, "relative_step": False, "scale_parameter": False} | options)
        for step in steps:
            for name, p in parameters.items():
                p.grad = step[name]
            optimizer.step()

    return update


REFERENCES: dict[str, tuple[Optimizer, Update]] = {
    "adamw": (AdamW(0.8, 0.9, 1e-3, 0.3), adamw),
    "sgd": (SGD(0.8, nesterov=True, weight_decay=0.3), sgd),
    "adafactor": (Adafactor(weight_decay=0.3), adafactor()),
    "adafactor with momentum": (
        Adafactor(momentum=0.7, clip=0.5, weight_decay=0.3),
        adafactor(beta1=0.7, clip_threshold=0.5),
    ),
    # transformers' relative steps are at most 10⁻², which is LR
    "adafactor of the paper": (
        Adafactor(weight_decay=0.3, scale_parameter=True, relative_step=True),
        adafactor(lr=None, scale_parameter=True, relative_step=True),
    ),
}


@pytest.mark.parametrize("steps", [1, 10])
@pytest.mark.parametrize("name", REFERENCES)
def test_steps_equal_an_independent_implementation(name: str, steps: int) -> None:
    spec, update = REFERENCES[name]
    trained = model(spec=STACKED)
    weights, decayed = weights_of(trained), names_of(trained, decayed_parameters(trained))
    update(weights, gradients(weights, steps), decayed)
    take_steps(trained, spec.build(trained, LR), gradients(weights, steps))
    for name, p in trained.named_parameters():
        assert (p - weights[name]).abs().max() < 1e-10, name


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust_lr", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("steps", [1, 10])
def test_muon_equals_torch_for_matrices_and_adamw_for_the_rest(
    steps: int, adjust_lr: str, nesterov: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "bfloat16", torch.float64)  # torch's Muon orthogonalizes in bfloat16 only
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda matrix: matrix.double().clone())  # as in torch 2.11
    spec = Muon(0.9, nesterov, adjust_lr=adjust_lr, weight_decay=0.3, adamw_scale=0.5, beta1=0.8, beta2=0.9, eps=1e-3)
    trained = model(spec=STACKED)
    matrices, decayed = names_of(trained, hidden_matrices(trained)), names_of(trained, decayed_parameters(trained))
    start, history = weights_of(trained), list(gradients(weights_of(trained), steps))
    others = {name: w.clone() for name, w in start.items() if name not in matrices}
    halves = [{name: step[name] for name in others} for step in history]
    reference = AdamW(0.8, 0.9, 1e-3, 0.3)
    holder = nn.ParameterDict({name.replace(".", "/"): nn.Parameter(w) for name, w in others.items()})
    groups = [
        {"params": [(n, p) for n, p in holder.items() if (n.replace("/", ".") in decayed) == d], "weight_decay": wd}
        for d, wd in ((True, 0.3), (False, 0.0))
    ]
    adam = torch.optim.AdamW([g for g in groups if g["params"]], LR * 0.5, (0.8, 0.9), reference.eps)
    for step in halves:
        for name, p in holder.items():
            p.grad = step[name.replace("/", ".")]
        adam.step()
    take_steps(trained, spec.build(trained, LR), iter(history))
    actual = weights_of(trained)
    assert all((actual[name] - holder[name.replace(".", "/")]).abs().max() < 1e-10 for name in others)
    for name in matrices:  # torch's Muon has no stacked matrices: one parameter per matrix
        slices = [nn.Parameter(w.clone()) for w in start[name].flatten(0, -3)] if start[name].ndim > 2 else None
        slices = slices or [nn.Parameter(start[name].clone())]
        muon = torch.optim.Muon(slices, LR, 0.3, 0.9, nesterov, adjust_lr_fn=adjust_lr)
        for step in history:
            for p, g in zip(slices, step[name].reshape(len(slices), *slices[0].shape), strict=True):
                p.grad = g
            muon.step()
        expected = torch.stack([p.detach() for p in slices]).view_as(actual[name])
        assert (actual[name] - expected).abs().max() < 1e-10, name


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4), (3, 5, 2)])
def test_orthogonalization_brings_singular_values_near_one(shape: tuple[int, ...]) -> None:
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    u, values, vt = torch.linalg.svd(matrix, full_matrices=False)
    result = orthogonalize(matrix, 5)
    inner = u.mT @ result @ vt.mT  # in the basis of the singular vectors: diagonal
    diagonal = inner.diagonal(dim1=-2, dim2=-1)
    assert (inner - torch.diag_embed(diagonal)).abs().max() < 1e-12
    assert diagonal.min() > 0.6 and diagonal.max() < 1.3 and values.max() > 2
    assert torch.equal(orthogonalize(torch.zeros(shape), 5), torch.zeros(shape))


def test_muon_updates_hidden_matrices_only() -> None:
    untied = model(tied=False)
    names = {name.split(".")[-2] for name in names_of(untied, hidden_matrices(untied))}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj", "down_proj"}
    assert {p.ndim for p in hidden_matrices(model(spec=STACKED))} == {2, 3}


def test_frozen_weights_are_not_optimized() -> None:
    frozen = model().requires_grad_(False)
    with pytest.raises(SpecError, match="no trainable parameter"):
        decay_groups(frozen)
    frozen.norm.requires_grad_(True)
    assert [[name for name, _ in group] for group in decay_groups(frozen)] == [[], ["norm.weight"]]
    assert len(AdamW().build(frozen, 1.0).param_groups) == 1
    assert len(Muon().build(frozen, 1.0).param_groups) == 1


SPECS = [AdamW(), Muon(), Adafactor(momentum=0.5), SGD(), SGD(momentum=0.0)]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.kind}-{getattr(spec, 'momentum', '')}")
def test_state_is_saved_by_name_and_restored_exactly(spec: Optimizer) -> None:
    first, second = model(), model()
    first_optimizer, second_optimizer = spec.build(first, 0.1), spec.build(second, 0.1)
    before, after = list(gradients(weights_of(first), 3)), list(gradients(weights_of(first), 1))
    take_steps(first, first_optimizer, iter(before))
    state = {name: tensor.clone() for name, tensor in optimizer_state(first_optimizer).items()}
    assert spec == SGD(momentum=0.0) or any(name.startswith("embedding.weight/") for name in state)
    second.load_state_dict(first.state_dict())
    load_optimizer_state(second_optimizer, dict(reversed(state.items())))
    take_steps(first, first_optimizer, iter(after))
    take_steps(second, second_optimizer, iter(after))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize("spec", SPECS[1:4], ids=lambda spec: spec.kind)
def test_a_resumed_run_is_bit_identical(spec: Optimizer, tmp_path: Path) -> None:
    settings = replace(SETTINGS, steps=4, save_every=2, evaluate_every=0, optimizer=spec)
    trainer(tmp_path / "whole", settings, sample=None).train()
    stopped = trainer(tmp_path / "resumed", settings, sample=None)
    step = stopped.step

    def stop_after_three(batch, position, start):
        if position.step == 3:
            raise KeyboardInterrupt
        return step(batch, position, start)

    stopped.step = stop_after_three
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    trainer(tmp_path / "resumed", settings, sample=None).train()
    first, second = (outcome_without_samples(tmp_path / name) for name in ("whole", "resumed"))
    assert first == second


def outcome_without_samples(path: Path) -> dict:
    (path / "samples.txt").touch()
    return outcome(path)


def test_state_of_another_model_is_refused() -> None:
    optimizer = AdamW().build(model(), 0.1)
    with pytest.raises(CheckpointError, match="'other.weight'"):
        load_optimizer_state(optimizer, {"other.weight/exp_avg": torch.zeros(1)})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AdamW(beta1=1.0), "adamw: beta1=1.0 must be in"),
        (lambda: AdamW8bit(eps=0.0), "adamw8bit: eps=0.0 must be positive"),
        (lambda: Muon(momentum=-0.1), "muon: momentum=-0.1"),
        (lambda: Muon(iterations=0), "iterations=0 must be positive"),
        (lambda: Adafactor(clip=0.0), "clip=0.0 must be positive"),
        (lambda: SGD(momentum=0.0, nesterov=True), "nesterov needs a momentum"),
        (lambda: Optimizer.from_dict({"kind": "moun"}), "did you mean 'muon'"),
    ],
)
def test_wrong_optimizers_are_refused(make: Callable[[], Optimizer], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make()


def test_every_optimizer_can_be_selected_by_its_kind() -> None:
    for kind in OPTIMIZERS:
        assert Optimizer.from_dict({"kind": kind}).kind == kind


class Quantized(Tensor):
    """A stand-in for a quantized state: a tensor subclass that consists of plain tensors."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None


class QuantizedSGD(torch.optim.SGD):
    """A stand-in for torchao's optimizers: a tensor as rate, and a state of its own class."""

    def __init__(self, groups: list, lr: float, betas: tuple, eps: float):
        super().__init__(groups, lr)
        for group in self.param_groups:
            group["lr"] = torch.tensor(group["lr"])

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            assert isinstance(group["lr"], Tensor)
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["moment"] = torch.zeros_like(p).as_subclass(Quantized)
                    state["moment"].codes = torch.zeros_like(p, dtype=torch.uint8)
                    state["moment"].scale = torch.zeros(())
                state["moment"].codes += (p.grad > 0).to(torch.uint8)
                state["moment"].scale += 0.5
                p -= group["lr"] * (p.grad + 0.1 * state["moment"].codes * state["moment"].scale)


def test_quantized_states_are_saved_as_plain_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    library = ModuleType("torchao.optim")
    library.AdamW8bit = QuantizedSGD
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.optim", library)
    monkeypatch.setattr("regard.training.optimizer.cannot_compile", lambda device: None)
    first, second = model(), model()
    first_optimizer, second_optimizer = (AdamW8bit().build(m, 0.1) for m in (first, second))
    history = list(gradients(weights_of(first), 3))
    take_steps(first, first_optimizer, iter(history[:2]))
    state = {name: tensor.clone() for name, tensor in optimizer_state(first_optimizer).items()}
    assert {type(tensor) for tensor in state.values()} == {Tensor}
    assert state["norm.weight/moment.codes"].dtype == torch.uint8
    second.load_state_dict(first.state_dict())
    load_optimizer_state(second_optimizer, state)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert all(float(group["lr"]) == pytest.approx(0.1) for group in second_optimizer.param_groups)
    set_learning_rate(second_optimizer, 0.2)
    set_learning_rate(first_optimizer, 0.2)
    take_steps(first, first_optimizer, iter(history[2:]))
    take_steps(second, second_optimizer, iter(history[2:]))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    with pytest.raises(CheckpointError, match="another state"):
        load_optimizer_state(second_optimizer, dict(list(state.items())[1:]))


def test_without_torchao_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(SpecError, match=r"needs torchao; install it with: pip install 'regard\[optimizers\]'"):
        AdamW8bit().build(model(), 0.1)
