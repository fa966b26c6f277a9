"""Every cell of backend × mask × bias × cap × sinks × place is the reference, or refused for the reason expected."""

import pytest
import torch

from regard.kernels.attention import BACKENDS, backend, reference, why
from regard.kernels.attention.score_options import ScoreOptions
from regard.layout import TokenLayout
from tests.kernels.cases import AT, BIASES, EXTRAS, HEADS, LENGTH, MASKS, ON_GPU, inputs, scores_of, with_gradients

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}
FOLDED = {name for name, mask in MASKS.items() if name not in ("causal", "full", "prefix")}


def expected_refusal(name: str, mask: str, layout: str, extra: str) -> str | None:
    if name in ON_GPU:
        return "needs a CUDA GPU, not cpu"
    if name == "sdpa" and "capped" in extra:
        return "cannot cap scores"
    if name != "block_sparse":
        return None
    if mask not in FOLDED:
        return "has nothing to fold"
    if AT[layout].keys is not None:
        return "needs keys that are the queries"
    if layout != "ordered" and not (AT[layout].consecutive and MASKS[mask].relative):
        return "needs (consecutive|whole) texts"
    return None


CROSSED = [(bias, extra) for bias in BIASES for extra in EXTRAS]
CASES = [(torch.float64, list(HEADS)[n % 3], *crossed) for n, crossed in enumerate(CROSSED)]
CASES += [(torch.float32, "grouped-query", "plain", extra) for extra in EXTRAS]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", AT)
def test_a_backend_is_the_reference_or_refuses(layout: str, mask: str) -> None:
    for dtype, heads, bias, extra in CASES:
        tensors = inputs(heads, AT[layout], dtype)
        wide = [x.detach().double().requires_grad_() for x in tensors]
        exact = scores_of(MASKS[mask], BIASES[bias], extra, torch.float64)
        expected = with_gradients(reference.attend, wide, AT[layout], exact)
        scores = scores_of(MASKS[mask], BIASES[bias], extra, dtype)
        for name in BACKENDS:
            reason = expected_refusal(name, mask, layout, extra)
            if reason is not None:
                with pytest.raises(ValueError, match=rf"{name}.*{reason}.*choose another, or auto"):
                    backend(name)(*tensors, AT[layout], scores)
                continue
            for f, e in zip(with_gradients(backend(name), tensors, AT[layout], scores), expected, strict=True):
                assert f.dtype == dtype
                error = (f - e).abs().max() / e.abs().max().clamp_min(1)
                assert error <= TOLERANCE[dtype], (name, heads, bias, extra)


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_row_that_sees_nothing_is_zero_with_finite_gradients(name: str, extra: str, bias: str) -> None:
    slots, valid = torch.arange(LENGTH).expand(2, LENGTH), torch.ones(2, LENGTH, dtype=torch.bool)
    valid[0] = False  # nothing at all in this row
    valid[1, :3] = False  # its first three queries see nothing
    layout = TokenLayout(slots, valid=valid, consecutive=True)
    tensors = inputs("grouped-query", layout, torch.float32)
    scores = scores_of(MASKS["window"], BIASES[bias], extra, torch.float32)
    if BACKENDS[name].refuses(*tensors, layout, scores) is not None:
        return
    out = backend(name)(*tensors, layout, scores)
    assert not out[0].any()
    assert not out[1, :, :3].any()
    assert out[1, :, -1].abs().min() > 0
    gradients = torch.autograd.grad(out.square().sum(), tensors)
    assert all(g.isfinite().all() for g in gradients)
    assert not gradients[0][0].any()


def test_auto_takes_the_first_that_can_and_says_why() -> None:
    tensors, layout = inputs("grouped-query", AT["ordered"], torch.float32), AT["ordered"]
    name, reason = why(*tensors, layout, ScoreOptions(MASKS["causal"]))
    assert name == "sdpa"
    assert reason.startswith("decode needs a CUDA GPU, not cpu; ")
    assert reason.endswith("; folded has nothing to fold: Causal sees too much")
    assert why(*tensors, layout, ScoreOptions(MASKS["dilated, no end"]))[0] == "block_sparse"
    name, reason = why(*tensors, layout, ScoreOptions(MASKS["window of more"]))
    assert (name, "folded would save little" in reason) == ("sdpa", True)
    name, reason = why(*tensors, layout, ScoreOptions(MASKS["causal"], softcap=2.0))
    assert name == "reference"
    assert "sdpa cannot cap scores; tiled would save little: 37 × 37 scores a head are few" in reason
    long = [torch.zeros(1, 1, 4096, 1, device="meta")] * 3
    assert why(*long, TokenLayout.whole(1, 4096), ScoreOptions(MASKS["causal"], softcap=2.0))[0] == "tiled"
    assert why(*long, TokenLayout.whole(1, 4096), ScoreOptions(MASKS["window"]))[0] == "block_sparse"


@pytest.mark.parametrize("mask", MASKS)
def test_auto_is_the_reference(mask: str) -> None:
    for layout in AT:
        tensors = inputs("grouped-query", AT[layout], torch.float64)
        scores = scores_of(MASKS[mask], None, "", torch.float64)
        found, expected = (with_gradients(f, tensors, AT[layout], scores) for f in (backend("auto"), reference.attend))
        assert all((f - e).abs().max() <= 1e-12 for f, e in zip(found, expected, strict=True))
