"""The chunked loss equals the cross-entropy of all logits in value, gradients and accuracy, and allocates one chunk."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels.linear_cross_entropy import linear_cross_entropy
from tests.kernels.largest_tensor import LargestTensor

TOKENS, WIDTH, VOCAB = 23, 6, 17
HEADS = {  # whether there is a bias, scale, cap
    "default": (False, 1.0, None),
    "bias": (True, 1.0, None),
    "scaled": (False, 0.25, None),
    "capped": (False, 1.0, 1.5),
    "bias, scaled, capped": (True, 3.0, 2.0),
}


def inputs(bias: bool, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor, Tensor]:
    shapes = [(TOKENS, WIDTH), (VOCAB, WIDTH), *([(VOCAB,)] if bias else [])]
    leaves = [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]
    weights = torch.rand(TOKENS, dtype=torch.promote_types(dtype, torch.float32)).where(torch.arange(TOKENS) % 5 > 0, 0)
    return leaves, torch.randint(VOCAB, (TOKENS,)), weights


def loss_of_all_logits(
    leaves: list[Tensor], targets: Tensor, weights: Tensor, scale: float, cap: float | None
) -> tuple:
    z = F.linear(*leaves).to(weights.dtype) * scale
    z = z if cap is None else cap * torch.tanh(z / cap)
    correct = ((z.argmax(-1) == targets) * weights).sum()
    return (F.cross_entropy(z, targets, reduction="none") * weights).sum(), correct


def chunked(leaves: list[Tensor], targets: Tensor, weights: Tensor, scale: float, cap: float | None, tokens=None):
    return linear_cross_entropy(*leaves[:2], targets, weights, *(leaves[2:] or [None]), scale, cap, tokens)


@pytest.mark.ledger("model.head", "eng.fused")
@pytest.mark.parametrize("tokens", [1, 5, TOKENS, None])
@pytest.mark.parametrize("head", HEADS)
def test_loss_accuracy_and_gradients_equal_those_of_all_logits(head: str, tokens: int | None) -> None:
    bias, scale, cap = HEADS[head]
    leaves, targets, weights = inputs(bias)
    expected, expected_correct = loss_of_all_logits(leaves, targets, weights, scale, cap)
    loss, correct = chunked(leaves, targets, weights, scale, cap, tokens)
    assert abs(loss - expected) <= 1e-12 * expected.abs()
    assert correct == expected_correct
    assert not correct.requires_grad
    gradients = torch.autograd.grad(1.7 * expected, leaves)
    for found, gradient in zip(torch.autograd.grad(1.7 * loss, leaves), gradients, strict=True):
        assert (found - gradient).abs().max() <= 1e-12


@pytest.mark.parametrize("head", HEADS)
def test_gradcheck(head: str) -> None:
    bias, scale, cap = HEADS[head]
    leaves, targets, weights = inputs(bias)
    torch.autograd.gradcheck(
        lambda *leaves: chunked(list(leaves), targets, weights, scale, cap, 7)[0], leaves, fast_mode=True
    )


def test_detached_weights_and_no_grad_are_supported() -> None:
    (x, weight), targets, weights = inputs(False)
    loss, _ = linear_cross_entropy(x, weight.detach(), targets, weights, tokens=4)
    loss.backward()
    assert x.grad is not None
    with torch.no_grad():
        assert not linear_cross_entropy(x, weight, targets, weights)[0].requires_grad
        assert linear_cross_entropy(x, weight, targets, weights)[0] == pytest.approx(loss.item())


def test_under_autocast_products_are_bfloat16_and_sums_float32() -> None:
    leaves, targets, weights = inputs(True, torch.float32)
    in_bfloat16 = [a.detach().bfloat16().requires_grad_() for a in leaves]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = chunked(leaves, targets, weights, 1.0, None, 8)
    expected, _ = loss_of_all_logits(in_bfloat16, targets, weights, 1.0, None)
    assert loss.dtype == torch.float32
    assert (loss - expected).abs() <= 1e-6 * expected
    for found, reference in zip(
        torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, in_bfloat16), strict=True
    ):
        assert found.dtype == torch.float32
        assert (found - reference).abs().max() <= 2**-6 * reference.abs().max()


@pytest.mark.ledger("model.head")
def test_logits_of_all_tokens_are_never_allocated() -> None:
    (x, weight), targets, weights = inputs(False)
    with LargestTensor() as largest:
        linear_cross_entropy(x, weight, targets, weights, tokens=4)[0].backward()
    assert largest.numel <= max(4 * VOCAB, x.numel(), weight.numel()) < TOKENS * VOCAB
    with LargestTensor() as largest:
        loss_of_all_logits([x, weight], targets, weights, 1.0, None)[0].backward()
    assert largest.numel == TOKENS * VOCAB


def test_weights_that_require_a_gradient_are_refused() -> None:
    (x, weight), targets, weights = inputs(bias=False)
    with pytest.raises(ValueError, match="weights.requires_grad is not supported"):
        linear_cross_entropy(x, weight, targets, weights.requires_grad_())
