"""A step divides once by the count, clips by the global gradient norm, and changes nothing if a value is not finite."""

import copy
import math
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from regard.compat import cannot_compile
from regard.data.batch import Batch
from regard.models.stack import Repeat
from regard.objectives.next_token import next_token
from regard.parts.attention import Attention
from regard.parts.block import Sublayer
from regard.parts.body import Body
from regard.parts.position.rope import Rope
from regard.parts.recurrent import LSTM
from regard.training.optimizer import AdamW
from regard.training.step import NonFinite, autocast, compile_model, take_step
from tests.training.tiny import SETTINGS, SPEC, curve, loader, trainer

CPU = torch.device("cpu")


def batch_and_model() -> tuple[Batch, torch.nn.Module]:
    batch = next(iter(loader()))
    batch = Batch(**{name: t.double() if t.is_floating_point() else t for name, t in batch.items()})
    return batch, SPEC.build(seed=0).double().eval()


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)  # its steps are the gradients themselves


@pytest.mark.ledger("anc.rnn.clip", "ft.full")
@pytest.mark.parametrize("clip", [0.0, 0.1, 1e6])
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_a_step_equals_autograd_with_clipped_gradients(micro_batches: int, clip: float) -> None:
    batch, model = batch_and_model()
    reference = copy.deepcopy(model)
    loss, count, _ = next_token(reference, batch)
    (loss / count).backward()
    expected_loss = float(loss.detach() / count)
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), clip or math.inf)
    before = [p.detach().clone() for p in model.parameters()]
    values = take_step(model, next_token, batch, sgd(model), clip, micro_batches)
    assert values["loss"] == pytest.approx(expected_loss, abs=1e-12)
    assert values["grad_norm"] == pytest.approx(float(norm), abs=1e-12)
    for p, old, expected in zip(model.parameters(), before, reference.parameters(), strict=True):
        # 1e-6: torch's own clipping adds that much to the norm
        assert (p - (old - expected.grad)).abs().max() <= (1e-6 if clip == 0.1 else 1e-12)
        assert p.grad is None


def test_an_uneven_split_is_refused() -> None:
    batch, model = batch_and_model()
    with pytest.raises(ValueError, match="4 rows cannot be split into accumulate=3"):
        take_step(model, next_token, batch, sgd(model), micro_batches=3)


def faulty_objective(fault: str):
    """The objective with one fault: in the loss of the second micro-batch, in the gradient only, or in the weights."""
    calls = []

    def objective(model, batch):
        loss, count, metrics = next_token(model, batch)
        calls.append(batch)
        if fault == "loss" and len(calls) == 2:
            loss = loss * math.nan
        if fault == "infinity" and len(calls) == 2:
            loss = loss + math.inf
        if fault == "gradient":
            loss = loss + 0 * (model.head.weight * 0).sum().sqrt()  # the derivative of √ at 0
        if fault == "weights":
            loss, count = loss * 0, count * 0
        return loss, count, metrics

    return objective


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("loss", "rows 2 to 3 is nan"),
        ("infinity", "rows 2 to 3 is inf"),
        ("gradient", "gradient is nan"),
        ("weights", "all weights of the batch are zero"),
    ],
)
def test_a_step_that_is_not_finite_changes_nothing(fault: str, message: str) -> None:
    batch, model = batch_and_model()
    optimizer = AdamW().build(model, 0.1)
    take_step(model, next_token, batch, optimizer)
    weights, moments = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
    with pytest.raises(NonFinite, match=message):
        take_step(model, faulty_objective(fault), batch, optimizer, clip=1.0, micro_batches=2)
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    for index, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(moments[index][name], tensor) for name, tensor in state.items())
    assert all(p.grad is None for p in model.parameters())


def test_a_cpu_computes_in_float32() -> None:
    assert autocast("auto", CPU) is autocast("float32", CPU) is nullcontext
    with pytest.raises(ValueError, match="needs a CUDA device"):
        autocast("bfloat16", CPU)


def test_cuda_computes_in_bfloat16_autocast() -> None:
    assert autocast("float32", torch.device("cuda")) is nullcontext
    assert autocast("auto", torch.device("cuda")).keywords == {"dtype": torch.bfloat16}


def test_without_a_compiler_the_model_runs_eagerly_with_one_note(monkeypatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    notes, model = [], SPEC.build(0)
    assert compile_model(model, CPU, notes.append) is model
    assert len(notes) == 1 and "C++ compiler" in notes[0]


@pytest.mark.slow
@pytest.mark.oldest
@pytest.mark.skipif(
    cannot_compile(CPU) is not None, reason="no C++ compiler on this machine (Debian: apt-get install g++)"
)
@pytest.mark.filterwarnings("default")  # torch's compiler warns
@pytest.mark.parametrize("mixer", [Attention(2, position=Rope()), LSTM()], ids=["attention", "lstm"])
def test_a_compiled_model_has_the_same_losses(mixer: Body, tmp_path: Path) -> None:
    settings = replace(SETTINGS, steps=3)
    block = replace(SPEC.layers[0].blocks[0], dropout=0.0)
    block = replace(block, sublayers=(Sublayer(mixer), *block.sublayers[1:]))
    spec = replace(SPEC, layers=(Repeat((block,)),))
    trainer(tmp_path / "eager", settings, model=spec.build(0), sample=None).train()
    trainer(tmp_path / "compiled", replace(settings, compile=True), model=spec.build(0), sample=None).train()
    eager_losses, compiled_losses = (
        [line["loss"] for line in curve(tmp_path / name) if "loss" in line] for name in ("eager", "compiled")
    )
    assert compiled_losses == pytest.approx(eager_losses, rel=1e-4)
