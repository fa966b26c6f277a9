"""The sampling kernel chooses the tokens that sampling by sorted probabilities chooses."""

import math

import pytest
import torch
from torch import Tensor

from regard.engine.request import Sampling
from regard.engine.sampling import apply_filters
from tests.kernels.triton_device import DEVICE

SETTINGS = [
    Sampling(temperature=0),
    Sampling(temperature=1),
    Sampling(temperature=0.3),
    Sampling(temperature=1e-9),
    Sampling(temperature=50.0),
    Sampling(temperature=1, top_k=1),
    Sampling(temperature=0.8, top_k=7),
    Sampling(temperature=1, top_k=10**6),
    Sampling(temperature=1, top_p=1e-9),
    Sampling(temperature=1.2, top_p=0.4),
    Sampling(temperature=1, top_p=0.999),
    Sampling(temperature=0.7, top_k=20, top_p=0.5),
    Sampling(temperature=1, min_p=0.2),
    Sampling(temperature=1, min_p=1.0),
    Sampling(temperature=1.1, top_k=40, top_p=0.9, min_p=0.02),
]


def pack(settings: list[Sampling], u: list[float]) -> Tensor:
    rows = [
        (s.temperature, s.top_k, s.top_p, math.log(s.min_p) if s.min_p else -math.inf, x)
        for s, x in zip(settings, u, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64, device=DEVICE)


def run(logits: Tensor, settings: list[Sampling], u: list[float]) -> tuple[list[int], Tensor]:
    from regard.kernels.triton_sampling import sample_rows

    ids, logprobs = sample_rows(logits.to(DEVICE), pack(settings, u), block=64)
    return ids.tolist(), logprobs.cpu()


def check(logits: Tensor, settings: list[Sampling], u: list[float]) -> None:
    """Every id is the first whose cumulative probability, in float64, exceeds u, up to the rounding of float32."""
    ids, logprobs = run(logits, settings, u)
    expected = logits.double().log_softmax(-1)[range(len(ids)), ids]
    assert torch.allclose(logprobs.double(), expected, rtol=0, atol=1e-5)
    for row, setting, id, x in zip(logits.double(), settings, ids, u, strict=True):
        if setting.temperature == 0:
            assert id == int(row.argmax())
            continue
        p = apply_filters(row.unsqueeze(0), [setting])[0].softmax(-1)
        assert p[id] > 0, setting
        cdf = p.cumsum(-1)
        assert cdf[id] - p[id] - 1e-5 <= x <= cdf[id] + 1e-5, setting


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tokens_are_those_of_sorted_probabilities(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(len(SETTINGS), 150, generator=generator) - 1).to(dtype)
    check(logits, SETTINGS, torch.rand(len(SETTINGS), generator=generator, dtype=torch.float64).tolist())


def test_ties_at_the_cutoff_are_kept_and_every_kept_token_is_reached() -> None:
    logits = torch.full((6, 100), -5.0)
    logits[:, [3, 50, 70, 99]] = 0.0  # four equal logits, one of them in the last block
    settings = [Sampling(temperature=1, top_k=2)] * 6
    ids, _ = run(logits, settings, [0.0, 0.2499, 0.2501, 0.51, 0.76, 1 - 2**-53])
    assert ids == [3, 3, 50, 70, 99, 99]


def test_negative_zero_is_zero() -> None:
    logits = torch.tensor([[-0.0, 0.0, -1.0, 0.0]]).expand(3, -1).contiguous()
    ids, _ = run(logits, [Sampling(temperature=1, top_k=1)] * 3, [0.1, 0.5, 0.9])
    assert ids == [0, 1, 3]


def test_excluded_tokens_are_never_drawn() -> None:
    logits = torch.full((5, 90), -math.inf)
    logits[:, 40], logits[:, 80] = 1.0, 1.0
    settings = [Sampling(temperature=1), Sampling(temperature=1, top_p=0.9), Sampling(temperature=1, top_k=50)]
    ids, _ = run(logits, [*settings, Sampling(temperature=1), Sampling(temperature=0)], [0.0, 0.7, 0.2, 0.999999, 0])
    assert ids == [40, 80, 40, 80, 40]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_rows_that_are_not_finite_have_no_logprob(value: float) -> None:
    logits = torch.randn(3, 70, generator=torch.Generator().manual_seed(1))
    logits[1, 66] = value
    for temperature in (0.0, 1.0):
        ids, logprobs = run(logits, [Sampling(temperature=temperature, top_p=0.9)] * 3, [0.5] * 3)
        assert all(0 <= id < 70 for id in ids)
        assert logprobs.isnan().tolist() == [False, True, False]


def test_rows_are_independent() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(4, 130, generator=generator)
    settings, u = SETTINGS[-4:], torch.rand(4, generator=generator).tolist()
    together = run(logits, settings, u)
    alone = [run(logits[i : i + 1], settings[i : i + 1], u[i : i + 1]) for i in range(4)]
    assert together[0] == [ids[0] for ids, _ in alone]
    assert together[1].tolist() == [logprobs[0].item() for _, logprobs in alone]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_vocabulary(dtype: torch.dtype) -> None:
    from regard.kernels.triton_sampling import sample_rows

    logits = (2 * torch.randn(len(SETTINGS), 151936, device="cuda")).to(dtype)
    u = torch.rand(len(SETTINGS), dtype=torch.float64).tolist()
    ids, _ = sample_rows(logits, pack(SETTINGS, u))
    for row, setting, id, x in zip(logits.double(), SETTINGS, ids.tolist(), u, strict=True):
        if setting.temperature:
            p = apply_filters(row.unsqueeze(0), [setting])[0].softmax(-1)
            cdf = p.cumsum(-1)
            assert p[id] > 0 and cdf[id] - p[id] - 1e-4 <= x <= cdf[id] + 1e-4, setting


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
def test_log_probabilities_of_rows() -> None:
    from regard.kernels.triton_sampling import log_softmax_rows

    logits = torch.randn(4, 150, generator=torch.Generator().manual_seed(0)) * 5
    logits[1, 70:] = -torch.inf
    logits[2, 3], logits[3, 5] = torch.nan, torch.inf
    found = log_softmax_rows(logits.to(DEVICE), block=64).cpu()
    expected = logits.double().log_softmax(-1)
    assert torch.allclose(found[:2].double(), expected[:2], rtol=0, atol=1e-5)
    assert found[2:].isnan().all()
