"""The chunked loss equals the cross-entropy of all logits in value, gradients and accuracy, and allocates one chunk."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels.linear_cross_entropy import linear_cross_entropy
from tests.kernels.largest_tensor import LargestTensor

TOKENS, WIDTH, VOCAB = 23, 6, 17
HEADS = {  # (has_bias, scale, cap)
    "default": (False, 1.0, None),
    "bias": (True, 1.0, None),
    "scaled": (False, 0.25, None),
    "capped": (False, 1.0, 1.5),
    "bias, scaled, capped": (True, 3.0, 2.0),
}


def inputs(bias: bool, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor, Tensor]:
    shapes = [(TOKENS, WIDTH), (VOCAB, WIDTH), *([(VOCAB,)] if bias else [])]
    leaves = [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]
    token_weights = torch.rand(TOKENS, dtype=torch.promote_types(dtype, torch.float32)).where(
        torch.arange(TOKENS) % 5 > 0, 0
    )
    return leaves, torch.randint(VOCAB, (TOKENS,)), token_weights


def loss_of_all_logits(
    leaves: list[Tensor], targets: Tensor, token_weights: Tensor, scale: float, cap: float | None
) -> tuple:
    z = F.linear(*leaves).to(token_weights.dtype) * scale
    z = z if cap is None else cap * torch.tanh(z / cap)
    correct = ((z.argmax(-1) == targets) * token_weights).sum()
    return (F.cross_entropy(z, targets, reduction="none") * token_weights).sum(), correct


EXTRA_TERMS = {"smoothed": (0.1, 0.0), "z-loss": (0.0, 0.3), "both": (0.2, 0.05)}  # label_smoothing, z_loss


@pytest.mark.ledger("model.head")
@pytest.mark.parametrize("terms", EXTRA_TERMS)
@pytest.mark.parametrize("head", HEADS)
def test_label_smoothing_and_z_loss_equal_autograd(head: str, terms: str) -> None:
    (bias, scale, cap), (smoothing, z_loss) = HEADS[head], EXTRA_TERMS[terms]
    leaves, targets, token_weights = inputs(bias)
    z = F.linear(*leaves) * scale
    z = z if cap is None else cap * torch.tanh(z / cap)
    losses = F.cross_entropy(z, targets, reduction="none", label_smoothing=smoothing)
    expected = ((losses + z_loss * z.exp().sum(-1).log().square()) * token_weights).sum()
    bias_or_none = leaves[2] if bias else None
    loss, _ = linear_cross_entropy(
        *leaves[:2], targets, token_weights, bias_or_none, scale, cap, 5, label_smoothing=smoothing, z_loss=z_loss
    )
    assert abs(loss - expected) <= 1e-12 * expected.abs()
    gradients = torch.autograd.grad(1.7 * expected, leaves)
    for found, gradient in zip(torch.autograd.grad(1.7 * loss, leaves), gradients, strict=True):
        assert (found - gradient).abs().max() <= 1e-12


def chunked(
    leaves: list[Tensor], targets: Tensor, token_weights: Tensor, scale: float, cap: float | None, chunk_size=None
):
    return linear_cross_entropy(*leaves[:2], targets, token_weights, *(leaves[2:] or [None]), scale, cap, chunk_size)


@pytest.mark.ledger("model.head", "eng.fused")
@pytest.mark.parametrize("chunk_size", [1, 5, TOKENS, None])
@pytest.mark.parametrize("head", HEADS)
def test_loss_accuracy_and_gradients_equal_those_of_all_logits(head: str, chunk_size: int | None) -> None:
    bias, scale, cap = HEADS[head]
    leaves, targets, token_weights = inputs(bias)
    expected, expected_correct = loss_of_all_logits(leaves, targets, token_weights, scale, cap)
    loss, correct = chunked(leaves, targets, token_weights, scale, cap, chunk_size)
    assert abs(loss - expected) <= 1e-12 * expected.abs()
    assert correct == expected_correct
    assert not correct.requires_grad
    gradients = torch.autograd.grad(1.7 * expected, leaves)
    for found, gradient in zip(torch.autograd.grad(1.7 * loss, leaves), gradients, strict=True):
        assert (found - gradient).abs().max() <= 1e-12


@pytest.mark.parametrize("head", HEADS)
def test_gradcheck(head: str) -> None:
    bias, scale, cap = HEADS[head]
    leaves, targets, token_weights = inputs(bias)
    torch.autograd.gradcheck(
        lambda *leaves: chunked(list(leaves), targets, token_weights, scale, cap, 7)[0], leaves, fast_mode=True
    )


def test_a_detached_head_weight_and_no_grad_are_supported() -> None:
    (x, weight), targets, token_weights = inputs(False)
    loss, _ = linear_cross_entropy(x, weight.detach(), targets, token_weights, chunk_size=4)
    loss.backward()
    assert x.grad is not None
    with torch.no_grad():
        assert not linear_cross_entropy(x, weight, targets, token_weights)[0].requires_grad
        assert linear_cross_entropy(x, weight, targets, token_weights)[0] == pytest.approx(loss.item())


def test_under_autocast_products_are_bfloat16_and_sums_float32() -> None:
    leaves, targets, token_weights = inputs(True, torch.float32)
    in_bfloat16 = [a.detach().bfloat16().requires_grad_() for a in leaves]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = chunked(leaves, targets, token_weights, 1.0, None, 8)
    expected, _ = loss_of_all_logits(in_bfloat16, targets, token_weights, 1.0, None)
    assert loss.dtype == torch.float32
    assert (loss - expected).abs() <= 1e-6 * expected
    for found, reference in zip(
        torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, in_bfloat16), strict=True
    ):
        assert found.dtype == torch.float32
        assert (found - reference).abs().max() <= 2**-6 * reference.abs().max()


@pytest.mark.ledger("model.head")
def test_logits_of_all_tokens_are_never_allocated() -> None:
    (x, weight), targets, token_weights = inputs(False)
    with LargestTensor() as largest:
        linear_cross_entropy(x, weight, targets, token_weights, chunk_size=4)[0].backward()
    assert largest.numel <= max(4 * VOCAB, x.numel(), weight.numel()) < TOKENS * VOCAB
    with LargestTensor() as largest:
        loss_of_all_logits([x, weight], targets, token_weights, 1.0, None)[0].backward()
    assert largest.numel == TOKENS * VOCAB


def test_token_weights_that_require_a_gradient_are_refused() -> None:
    (x, weight), targets, token_weights = inputs(bias=False)
    with pytest.raises(ValueError, match="weights.requires_grad is not supported"):
        linear_cross_entropy(x, weight, targets, token_weights.requires_grad_())
