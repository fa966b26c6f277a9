"""Every backend × mask × bias × cap × sinks × layout equals the reference, or is refused with the expected reason."""

from itertools import product

import pytest
import torch

from regard.kernels.attention import BACKENDS, backend, choose_once, reference, sdpa, select_backend
from regard.kernels.attention.arguments import ScoreOptions, describe
from regard.layout import TokenLayout
from tests.kernels.cases import (
    BIASES,
    EXTRAS,
    HEADS,
    LAYOUTS,
    LENGTH,
    MASKS,
    ON_GPU,
    inputs,
    options_of,
    with_gradients,
)

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}
SPARSE = {name for name, mask in MASKS.items() if name not in ("causal", "full", "prefix")}


def expected_refusal(name: str, mask: str, layout: str, extra: str) -> str | None:
    if name in ON_GPU:
        return "needs a CUDA GPU, not cpu"
    if name == "sdpa" and "capped" in extra:
        return "has no softcap"
    if name != "block_sparse":
        return None
    if mask not in SPARSE:
        return "needs a sparse mask"
    if LAYOUTS[layout].keys is not None:
        return "needs the queries' own tokens as keys"
    if layout != "ordered" and not (LAYOUTS[layout].consecutive and MASKS[mask].relative):
        return "needs (consecutive tokens|whole sequences)"
    return None


BIASES_AND_EXTRAS = [(bias, extra) for bias in BIASES for extra in EXTRAS]
CASES = [(torch.float64, list(HEADS)[n % 3], *bias_and_extra) for n, bias_and_extra in enumerate(BIASES_AND_EXTRAS)]
CASES += [(torch.float32, "grouped-query", "no bias", extra) for extra in EXTRAS]
LAYOUTS_AND_MASKS = list(product(LAYOUTS, MASKS))


def quick_cases(layout: str, mask: str) -> list[tuple]:
    """A quarter of the cases: one extra with every bias and all heads; the next layout or mask has another extra."""
    return CASES[(list(LAYOUTS).index(layout) + list(MASKS).index(mask)) % 4 :: 4]


def slow_cases(layout: str, mask: str) -> list[tuple]:
    return [case for case in CASES if case not in quick_cases(layout, mask)]


@pytest.mark.parametrize(
    ("layout", "mask", "cases"),
    [
        *(pytest.param(*names, quick_cases(*names), id="-".join(names)) for names in LAYOUTS_AND_MASKS),
        *(
            pytest.param(*names, slow_cases(*names), id="-".join((*names, "slow")), marks=pytest.mark.slow)
            for names in LAYOUTS_AND_MASKS
        ),
    ],
)
def test_backend_equals_the_reference_or_refuses(layout: str, mask: str, cases: list[tuple]) -> None:
    for dtype, heads, bias, extra in cases:
        tensors = inputs(heads, LAYOUTS[layout], dtype)
        in_float64 = [x.detach().double().requires_grad_() for x in tensors]
        exact_options = options_of(MASKS[mask], BIASES[bias], extra, torch.float64)
        expected = with_gradients(reference.attend, in_float64, LAYOUTS[layout], exact_options)
        options = options_of(MASKS[mask], BIASES[bias], extra, dtype)
        for name in BACKENDS:
            reason = expected_refusal(name, mask, layout, extra)
            if reason is not None:
                with pytest.raises(ValueError, match=rf"{name}.*{reason}.*choose another backend, or auto"):
                    backend(name)(*tensors, LAYOUTS[layout], options)
                continue
            for f, e in zip(with_gradients(backend(name), tensors, LAYOUTS[layout], options), expected, strict=True):
                assert f.dtype == dtype
                error = (f - e).abs().max() / e.abs().max().clamp_min(1)
                assert error <= TOLERANCE[dtype], (name, heads, bias, extra)


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("name", BACKENDS)
def test_query_without_keys_is_zero_with_finite_gradients(name: str, extra: str, bias: str) -> None:
    slots, valid = torch.arange(LENGTH).expand(2, LENGTH), torch.ones(2, LENGTH, dtype=torch.bool)
    valid[0] = False  # no valid key in this row
    valid[1, :3] = False  # no key for its first three queries
    layout = TokenLayout(slots, valid=valid, consecutive=True)
    tensors = inputs("grouped-query", layout, torch.float32)
    options = options_of(MASKS["window"], BIASES[bias], extra, torch.float32)
    if BACKENDS[name].unsupported_reason(describe(*tensors, layout, options)) is not None:
        return
    out = backend(name)(*tensors, layout, options)
    assert not out[0].any()
    assert not out[1, :, :3].any()
    assert out[1, :, -1].abs().min() > 0
    gradients = torch.autograd.grad(out.square().sum(), tensors)
    assert all(g.isfinite().all() for g in gradients)
    assert not gradients[0][0].any()


def test_auto_chooses_the_first_suitable_backend_with_reasons() -> None:
    tensors, layout = inputs("grouped-query", LAYOUTS["ordered"], torch.float32), LAYOUTS["ordered"]
    name, reason = select_backend(*tensors, layout, ScoreOptions(MASKS["causal"]))
    assert name == "sdpa"
    assert reason.startswith("decode needs a CUDA GPU, not cpu; ")
    assert reason.endswith("; block_sparse needs a sparse mask; Causal has no block layout")
    options = ScoreOptions(MASKS["dilated, longer than the sequence"])
    assert select_backend(*tensors, layout, options)[0] == "block_sparse"
    name, reason = select_backend(*tensors, layout, ScoreOptions(MASKS["window of a block and one token"]))
    assert (name, "block_sparse would save little" in reason) == ("sdpa", True)
    name, reason = select_backend(*tensors, layout, ScoreOptions(MASKS["causal"], softcap=2.0))
    assert name == "reference"
    assert "sdpa has no softcap; tiled would save little: only 37 × 37 scores per head" in reason
    long_sequence, layout = [torch.zeros(1, 1, 4096, 1, device="meta")] * 3, TokenLayout.whole(1, 4096)
    assert select_backend(*long_sequence, layout, ScoreOptions(MASKS["causal"], softcap=2.0))[0] == "tiled"
    assert select_backend(*long_sequence, layout, ScoreOptions(MASKS["window"]))[0] == "block_sparse"


@pytest.mark.parametrize("mask", MASKS)
def test_auto_equals_the_reference(mask: str) -> None:
    for layout in LAYOUTS:
        tensors = inputs("grouped-query", LAYOUTS[layout], torch.float64)
        options = options_of(MASKS[mask], None, "", torch.float64)
        found, expected = (
            with_gradients(f, tensors, LAYOUTS[layout], options) for f in (backend("auto"), reference.attend)
        )
        assert all((f - e).abs().max() <= 1e-12 for f, e in zip(found, expected, strict=True))


def test_auto_chooses_once_for_equal_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, layout = inputs("grouped-query", LAYOUTS["ordered"], torch.float32), LAYOUTS["ordered"]
    considered: list[str] = []
    monkeypatch.setattr(sdpa, "slower_reason", lambda call: considered.append(type(call.mask).__name__))
    choose_once.cache_clear()
    for mask in ("causal", "causal", "full", "causal"):
        backend("auto")(*tensors, layout, ScoreOptions(MASKS[mask]))
    assert considered == ["Causal", "Full"]
    without_gradients = [x.detach() for x in tensors]  # other arguments, so the choice is made again
    backend("auto")(*without_gradients, layout, ScoreOptions(MASKS["causal"]))
    assert considered == ["Causal", "Full", "Causal"]


def test_auto_compiles_for_any_length_without_a_cached_choice() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return backend("auto")(q, k, v, TokenLayout.whole(1, q.shape[2]), ScoreOptions(MASKS["causal"]))

    compiled, before = torch.compile(attend, fullgraph=True, dynamic=True, backend="eager"), choose_once.cache_info()
    for length in (5, 9):
        tensors = [torch.randn(1, heads, length, 8) for heads in (4, 2, 2)]
        expected = backend("reference")(*tensors, TokenLayout.whole(1, length), ScoreOptions(MASKS["causal"]))
        assert (compiled(*tensors) - expected).abs().max() < 1e-5
    assert choose_once.cache_info() == before
