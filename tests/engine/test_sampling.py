"""Filters and penalties against transformers' logits processors, draws against the exact distribution by chi-square."""

import math

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from regard.engine.request import Request, Sampling, Token, TokenHistory
from regard.engine.sampling import apply_filters, choose, cutoff, penalize, sample, uniform

FILTERS = [
    {"temperature": 0.6},
    {"temperature": 1.7, "top_k": 1},
    {"temperature": 0.8, "top_k": 20},
    {"top_k": 5000},
    {"top_p": 0.3},
    {"temperature": 1.4, "top_p": 0.95},
    {"min_p": 0.1},
    {"temperature": 1.2, "top_k": 40, "top_p": 0.9, "min_p": 0.05},
    {"top_p": 1e-6},
    {"min_p": 1.0},
    {"typical_p": 0.2},
    {"typical_p": 0.9, "temperature": 1.3},
    {"typical_p": 0.6, "top_k": 30, "top_p": 0.95},
]


def request(ids=(0,), **settings) -> Request:
    result = Request(tuple(ids), Sampling(**settings))
    if result.sampling.penalizes:
        result.history = TokenHistory(ids, 500, torch.device("cpu"))
    return result


def processed_by_transformers(logits: torch.Tensor, s: Sampling) -> torch.Tensor:
    """The logits after the processors of transformers, in the order in which it applies them."""
    processors = LogitsProcessorList([TemperatureLogitsWarper(s.temperature)])
    processors += [TopKLogitsWarper(s.top_k)] if s.top_k else []
    processors += [TopPLogitsWarper(s.top_p)] if s.top_p < 1 else []
    processors += [MinPLogitsWarper(s.min_p)] if s.min_p else []
    processors += [TypicalLogitsWarper(s.typical_p)] if s.typical_p < 1 else []
    return processors(torch.zeros(1, 1, dtype=torch.int64), logits.unsqueeze(0))[0]


@pytest.mark.parametrize("spread", [0.1, 2.0, 12.0])
def test_filters_equal_those_of_transformers(spread) -> None:
    samplings = [Sampling(**settings) for settings in FILTERS]
    logits = torch.randn(len(samplings), 500, dtype=torch.float64) * spread
    restricted = apply_filters(logits, samplings)
    for row, found, settings in zip(logits, restricted, samplings, strict=True):
        expected = processed_by_transformers(row, settings)
        assert torch.equal(found.isinf(), expected.isinf()), settings
        torch.testing.assert_close(found.softmax(-1), expected.softmax(-1), rtol=0, atol=1e-12)


def test_top_p_keeps_no_token_after_the_cumulative_probability_reaches_it() -> None:
    logits = torch.tensor([[0.125, 0.5, 0.25, 0.0625, 0.0625]], dtype=torch.float64).log()
    for top_p, expected in ((0.5, [1]), (0.5 + 1e-9, [1, 2]), (0.75, [1, 2]), (0.875, [0, 1, 2])):
        found = apply_filters(logits, [Sampling(top_p=top_p)])[0]
        assert found.isfinite().nonzero().flatten().tolist() == expected, top_p


def test_repetition_penalty_equals_that_of_transformers() -> None:
    logits = torch.randn(1, 500, dtype=torch.float64) * 3
    ids, new = [3, 9, 9, 77], [120, 9, 4]
    penalized = request(ids, repetition_penalty=1.4)
    for id in new:
        penalized.history.add(id)
    expected = RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor([ids + new]), logits)
    torch.testing.assert_close(
        penalize(logits, [penalized.history], [penalized.sampling]), expected, rtol=0, atol=1e-12
    )


def test_presence_and_frequency_penalties_count_new_tokens_only() -> None:
    logits = torch.randn(1, 500, dtype=torch.float64)
    penalized = request([1, 2], presence_penalty=0.5, frequency_penalty=0.25)
    for id in (2, 7, 7, 7):
        penalized.history.add(id)
    expected = logits.clone()
    expected[0, 2] -= 0.5 + 0.25
    expected[0, 7] -= 0.5 + 3 * 0.25
    torch.testing.assert_close(
        penalize(logits, [penalized.history], [penalized.sampling]), expected, rtol=0, atol=1e-12
    )


@pytest.mark.ledger("dec.sampling")
@pytest.mark.parametrize("settings", [*FILTERS[:8], FILTERS[-1]], ids=str)
def test_draws_follow_the_distribution(settings) -> None:
    """Chi-square over 20,000 draws, each with its own seed; cells with an expected count below five are merged."""
    draws = 20_000
    logits = torch.randn(50, dtype=torch.float64) * 1.5
    p = processed_by_transformers(logits, Sampling(**settings)).softmax(-1)
    requests = [request(seed=seed, **settings) for seed in range(draws)]
    ids = choose(logits.expand(draws, -1), requests)
    counts, expected = torch.bincount(ids, minlength=50).double(), p * draws
    assert not counts[p == 0].any()
    large = expected >= 5
    counts = torch.cat([counts[large], counts[~large].sum().view(1)])
    expected = torch.cat([expected[large], expected[~large].sum().view(1)]).clamp_min(1e-9)
    freedom = max(len(counts) - 1, 1)
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 8, (chi_square, freedom)  # fails by chance once in ~10⁵


def test_uniform_is_uniform_over_seeds_and_steps() -> None:
    numbers, zeros = range(50_000), [0] * 50_000
    for values in (uniform(numbers, zeros), uniform([1] * 50_000, numbers)):
        cells = torch.from_numpy(values).mul(100).long()
        chi_square = ((torch.bincount(cells, minlength=100) - 500.0) ** 2 / 500).sum().item()
        assert 50 < chi_square < 165
    pairs = np.stack([uniform(numbers, zeros), uniform(numbers, [1] * 50_000), uniform(range(1, 50_001), zeros)])
    assert torch.corrcoef(torch.from_numpy(pairs)).fill_diagonal_(0).abs().max() < 0.03


def test_uniform_is_splitmix64() -> None:
    """Equal to plain integers, also where products and sums exceed 64 bits: a seed gives the same tokens for ever."""

    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    seeds, steps = [0, 7, 2**63, 2**64 - 1, 2**64 - 1], [0, 3, 1, 0, 2**31]
    expected = [
        (mix((mix(seed) + (step + 1) * 0x9E3779B97F4A7C15) % 2**64) >> 11) / 2**53
        for seed, step in zip(seeds, steps, strict=True)
    ]
    assert uniform(seeds, steps).tolist() == expected


def test_steps_are_counted_from_the_first_new_token() -> None:
    """The draws of a seed do not depend on the length of the prompt."""
    short, long = request([1], seed=5), request([1, 2, 3, 4], seed=5)
    ids = []
    for logits in torch.randn(20, 1, 500):
        tokens = [sample(logits, [each]).read()[0] for each in (short, long)]
        assert tokens[0] == tokens[1]
        ids.append(tokens[0].id)
        short.add(tokens[0])
        long.add(tokens[1])
    assert len(set(ids)) > 10
    flat = torch.zeros(1, 500)
    repeated = [sample(flat, [request(seed=5)]).read()[0].id for _ in range(2)]
    assert repeated[0] == repeated[1] != sample(flat, [short]).read()[0].id


@pytest.mark.ledger("dec.sampling")
def test_a_row_does_not_depend_on_the_batch() -> None:
    logits = torch.randn(40, 500) * 2
    settings = [*FILTERS, {"temperature": 0, "top_logprobs": 3}, {"temperature": 0, "presence_penalty": 2.0}]
    requests = [request([1, 5], seed=i, **settings[i % len(settings)]) for i in range(40)]
    batched = sample(logits, requests).read()
    assert batched == [sample(logits[i : i + 1], [requests[i]]).read()[0] for i in range(40)]
    assert batched == sample(logits, requests, separately=True).read()


def test_separate_requests_may_ask_for_different_numbers_of_logprobs() -> None:
    logits = torch.randn(5, 50)
    logits[3, 2:] = -torch.inf
    requests = [request(temperature=0, top_logprobs=n) for n in (1, 4, 0, 3, 2)]
    found = sample(logits, requests, separately=True).read()
    assert found == [sample(logits[i : i + 1], [requests[i]]).read()[0] for i in range(5)]


def test_ties_are_kept_in_every_batch() -> None:
    """Half-precision logits often tie. The batch decides how many are sorted, but not which tokens are kept."""
    logits = torch.randint(0, 4, (2, 500)).double()
    few, many = Sampling(top_k=3, top_p=0.8), Sampling(top_k=400)
    assert cutoff(logits[:1], [few]) == cutoff(logits, [few, many])[0]


@pytest.mark.ledger("dec.sampling")
def test_a_tiny_temperature_is_greedy_and_a_huge_one_almost_uniform() -> None:
    logits = torch.randn(1, 500) * 100
    best = logits.argmax().item()
    for temperature in (0.0, 1e-300, 1e-30):
        assert choose(logits, [request(temperature=temperature, seed=3)]).item() == best
    flat = [choose(logits, [request(temperature=1e9, seed=seed)]).item() for seed in range(200)]
    assert len(set(flat)) > 100


def test_logprobs_are_computed_before_temperature_filters_and_penalties() -> None:
    logits = torch.randn(2, 500)
    requests = [
        request(temperature=0, top_logprobs=3),
        request([4], temperature=0.5, top_k=1, frequency_penalty=1.0, seed=1),
    ]
    tokens = sample(logits, requests).read()
    logprobs = logits.log_softmax(-1)
    for row, token in zip(logprobs, tokens, strict=True):
        assert token.logprob == pytest.approx(row[token.id].item(), abs=1e-5)
    best = logprobs[0].topk(3)
    assert [id for id, _ in tokens[0].top_logprobs] == best.indices.tolist()
    assert [logprob for _, logprob in tokens[0].top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert tokens[1].top_logprobs == () and tokens[1].rank is tokens[1].entropy is None
    entropy = -(logprobs[0].exp() * logprobs[0]).sum().item()
    assert tokens[0].entropy == pytest.approx(entropy, abs=1e-5)
    banned = sample(logits[:1].index_fill(1, torch.tensor([0]), -torch.inf), [request(top_logprobs=1)]).read()[0]
    assert math.isfinite(banned.entropy) and banned.entropy != tokens[0].entropy  # 0 log 0 is 0
    drawn = sample(logits[:1], [request(temperature=9.0, top_logprobs=1, seed=2)]).read()[0]
    assert drawn.rank == 1 + (logprobs[0] > logprobs[0, drawn.id]).sum() > 1 == tokens[0].rank


@pytest.mark.parametrize(
    "settings", [*FILTERS, {"temperature": 0}, {"frequency_penalty": 1.0, "top_logprobs": 4}], ids=str
)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_yield_no_token(value, settings) -> None:
    logits = torch.randn(3, 500)
    healthy = [sample(logits[i : i + 1], [request(seed=i, **settings)]).read()[0] for i in range(3)]
    logits[1, 200] = value
    logits[0, 3] = -math.inf  # -inf is valid: the token is impossible
    tokens = sample(logits, [request(seed=i, **settings) for i in range(3)]).read()
    assert isinstance(tokens[1], str) and isinstance(tokens[0], Token) and tokens[2] == healthy[2]
    assert sample(torch.full((1, 500), -math.inf), [request(seed=1, **settings)]).read() == [
        "the model's logits for this request are not finite"
    ]


def test_a_request_gets_the_same_token_beside_requests_that_the_kernel_does_not_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("tests.kernels.triton_device")
    monkeypatch.setattr("regard.engine.sampling.has_kernel", lambda logits: True)
    logits = torch.randn(4, 60, generator=torch.Generator().manual_seed(3))
    requests = [request(seed=i, temperature=1.0, top_p=0.9) for i in range(3)]
    requests.append(request(seed=3, temperature=1.0, suppress_ids=(1,), top_logprobs=2))
    alone = [sample(logits[i : i + 1], [each]).read()[0] for i, each in enumerate(requests)]
    assert sample(logits, requests).read() == alone
    assert len(alone[3].top_logprobs) == 2
