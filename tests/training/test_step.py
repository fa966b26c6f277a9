"""A step divides once, clips by the whole norm, and changes nothing when a number is none."""

import copy
import math

import pytest
import torch

from regard.data.batch import Batch
from regard.objectives.next_token import next_token
from regard.training.optimizer import AdamW
from regard.training.step import NonFinite, take_step
from tests.training.tiny import SPEC, loader


def batch_and_model() -> tuple[Batch, torch.nn.Module]:
    batch = next(iter(loader()))
    batch = Batch(**{name: t.double() if t.is_floating_point() else t for name, t in batch.items()})
    return batch, SPEC.build(seed=0).double().eval()


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)  # its steps are the gradients themselves


@pytest.mark.ledger("anc.rnn.clip", "ft.full")
@pytest.mark.parametrize("clip", [0.0, 0.1, 1e6])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_against_plain_autograd(parts: int, clip: float) -> None:
    batch, model = batch_and_model()
    plain = copy.deepcopy(model)
    loss, count, _ = next_token(plain, batch)
    (loss / count).backward()
    wanted, norm = float(loss.detach() / count), torch.nn.utils.clip_grad_norm_(plain.parameters(), clip or math.inf)
    before = [p.detach().clone() for p in model.parameters()]
    values = take_step(model, next_token, batch, sgd(model), clip, parts)
    assert values["loss"] == pytest.approx(wanted, abs=1e-12)
    assert values["grad_norm"] == pytest.approx(float(norm), abs=1e-12)
    for p, old, reference in zip(model.parameters(), before, plain.parameters(), strict=True):
        # 1e-6: torch's own clipping adds that much to the norm
        assert (p - (old - reference.grad)).abs().max() <= (1e-6 if clip == 0.1 else 1e-12)
        assert p.grad is None


def test_parts_that_do_not_divide_are_refused() -> None:
    batch, model = batch_and_model()
    with pytest.raises(ValueError, match="4 rows cannot be cut into accumulate=3"):
        take_step(model, next_token, batch, sgd(model), parts=3)


def poisoned(where: str):
    """The objective, spoilt: in the loss of the second part, in the gradient alone, or by weights that are all zero."""
    calls = []

    def objective(model, batch):
        loss, count, metrics = next_token(model, batch)
        calls.append(batch)
        if where == "loss" and len(calls) == 2:
            loss = loss * math.nan
        if where == "infinity" and len(calls) == 2:
            loss = loss + math.inf
        if where == "gradient":
            loss = loss + 0 * (model.head.weight * 0).sum().sqrt()  # the slope of √ at 0
        if where == "weights":
            loss, count = loss * 0, count * 0
        return loss, count, metrics

    return objective


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("loss", "rows 2 to 3 is nan"),
        ("infinity", "rows 2 to 3 is inf"),
        ("gradient", "gradient is nan"),
        ("weights", "none of its tokens counts"),
    ],
)
def test_no_number_no_step(where: str, told: str) -> None:
    batch, model = batch_and_model()
    optimizer = AdamW().build(model, 0.1)
    take_step(model, next_token, batch, optimizer)
    weights, moments = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
    with pytest.raises(NonFinite, match=told):
        take_step(model, poisoned(where), batch, optimizer, clip=1.0, parts=2)
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    for index, quantities in optimizer.state_dict()["state"].items():
        assert all(torch.equal(moments[index][name], tensor) for name, tensor in quantities.items())
    assert all(p.grad is None for p in model.parameters())
