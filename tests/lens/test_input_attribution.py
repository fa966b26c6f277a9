"""Attributions are exact for linear models, and integrated gradients add up to the difference of the metric."""

import pytest
import torch
from torch import Tensor, nn

from regard.lens import gradient_times_input, integrated_gradients, patch
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.position.rope import Rope
from tests.lens.conftest import attention_block


def last_logit(logits: Tensor) -> Tensor:
    return logits[:, -1, 3]


class LinearModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.input, self.head = nn.Embedding(11, 5), nn.Identity(), nn.Linear(5, 4)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.input(self.embedding(ids)).cumsum(1))


@pytest.mark.ledger("lens.attribution")
def test_both_are_exact_for_a_linear_model() -> None:
    model, ids = LinearModel(), torch.tensor([[1, 4, 4, 7], [9, 0, 2, 3]])
    exact = model.embedding(ids) @ model.head.weight[3]
    assert torch.allclose(gradient_times_input(model, ids, last_logit, "input"), exact, atol=1e-12)
    result = integrated_gradients(model, ids, last_logit, name="input")
    assert torch.allclose(result.tokens, exact, atol=1e-12) and result.error.max() < 1e-12


@pytest.mark.ledger("lens.attribution")
@pytest.mark.parametrize("zero", [True, False])
def test_integrated_gradients_are_complete(ids, zero: bool) -> None:
    layers = (Repeat((attention_block(2, Rope()),)),)
    model = Decoder(vocab=31, width=16, layers=layers).build(seed=1).double()
    baseline = None if zero else model.embedding.weight.detach().mean(0)
    result = integrated_gradients(model, ids, last_logit, baseline)
    assert result.tokens.shape == ids.shape and result.difference.abs() > 0.05
    assert result.error <= 1e-3 * result.difference.abs().clamp(min=1)
    start = 0 if baseline is None else baseline
    x = model.embedding(ids)
    with torch.no_grad(), patch(model, {"stack.input": lambda x: torch.zeros_like(x) + start}):
        at_start = last_logit(model(ids))
    assert torch.allclose(result.difference, last_logit(model(ids)) - at_start)
    t = (torch.arange(4000).double() + 0.5) / 4000  # the midpoint rule, with most points near the start: α = t⁶
    path = torch.lerp(torch.zeros_like(x) + start, x, (t**6)[:, None, None]).detach().requires_grad_()
    with patch(model, {"stack.input": path}):
        (gradient,) = torch.autograd.grad(last_logit(model(ids.expand(4000, -1))).sum(), path)
    exact = ((gradient * (6 * t**5)[:, None, None]).mean(0) * (x - start)[0]).sum(-1)
    precise = integrated_gradients(model, ids, last_logit, baseline, tolerance=1e-6)
    assert (precise.tokens[0] - exact).abs().max() < 1e-4


def test_an_integral_that_does_not_converge_warns(make_model, ids) -> None:
    with pytest.warns(UserWarning, match="raise max_intervals"):
        integrated_gradients(make_model(), ids, last_logit, max_intervals=1)


def test_gradient_times_input_equals_autograd(make_model, ids) -> None:
    model = make_model()
    x = model.embedding(ids).detach().requires_grad_()
    hook = model.embedding.register_forward_hook(lambda *_: x)
    (gradient,) = torch.autograd.grad(last_logit(model(ids)).sum(), x)
    hook.remove()
    found = gradient_times_input(model, ids, last_logit)
    assert torch.allclose(found, (x * gradient).sum(-1), atol=1e-10)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_metric_of_another_shape_is_refused(make_model, ids) -> None:
    with pytest.raises(ValueError, match="one number per row"):
        gradient_times_input(make_model(), ids, lambda logits: logits)
