"""The rules against the logits processors of `transformers`, on random tokens and logits; segments, subtitles."""

import random

import pytest
import torch
import transformers
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from regard.speech.decoding_rules import DecodingRules
from regard.speech.speech_decoder import split_segments
from regard.speech.whisper_tokens import WhisperTokens

VOCAB = 60
TOKENS = WhisperTokens(
    start=31, end=30, no_timestamps=39, previous=37, languages={"en": 32, "de": 33}, tasks={"transcribe": 34},
    suppress=(1, 2, 31, 38), begin_suppress=(5, 30), max_initial_timestamp=7,
)  # fmt: skip


def random_text(rng: random.Random) -> list[int]:
    """New tokens that the rules allow: a timestamp, then words between pairs of timestamps."""
    time, new = 40 + rng.randrange(8), []
    while time < VOCAB:
        new += [time, *(rng.randrange(3, 30) for _ in range(rng.randrange(1, 4)))]
        time += rng.randrange(1, 6)
        if time < VOCAB:
            new.append(time)
        time += rng.choice((0, 0, 2))
    return new[: rng.randrange(len(new) + 1)]


@pytest.mark.parametrize("sharpness", [1.0, 6.0])
def test_rules_equal_transformers(sharpness: float) -> None:
    config = transformers.GenerationConfig(no_timestamps_token_id=39, eos_token_id=30, max_initial_timestamp_index=7)
    theirs = [
        SuppressTokensAtBeginLogitsProcessor(TOKENS.begin_suppress, begin_index=3),
        SuppressTokensLogitsProcessor(TOKENS.suppress),
        WhisperTimeStampLogitsProcessor(config, begin_index=3),
    ]
    rng, forced = random.Random(0), 0
    for seed in range(300):
        ids = torch.tensor([31, 32, 34, *random_text(rng)])
        logits = sharpness * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
        expected = logits.unsqueeze(0)
        for processor in theirs:
            expected = processor(ids.unsqueeze(0), expected)
        rules = DecodingRules(TOKENS, 1, [(32,), (34,)], timestamps=True)
        found = rules(ids, logits.clone())
        assert torch.equal(found, expected[0])
        kept = found > -torch.inf
        shift = float(logits.logsumexp(-1) - found[kept].logsumexp(-1))
        assert float(rules.shifts[len(ids) - 1]) == pytest.approx(shift, abs=1e-5)
        forced += int(not kept[:40].any())
    assert 20 < forced < 280  # timestamps are sometimes more likely than any word


def test_given_tokens_and_the_language() -> None:
    rules = DecodingRules(TOKENS, 2, [(32, 33), (34,)], timestamps=False)
    logits = torch.zeros(VOCAB).index_fill(0, torch.tensor([33, 38]), 2.0).index_fill(0, torch.tensor([9]), 5.0)
    assert rules(torch.tensor([37, 31]), logits.clone()).isfinite().nonzero().tolist() == [[33]]
    assert float(rules.no_speech) == pytest.approx(float(logits.softmax(-1)[38]))
    assert rules(torch.tensor([37, 31, 33]), logits.clone()).isfinite().nonzero().tolist() == [[34]]
    free = rules(torch.tensor([37, 31, 33, 34]), logits.clone())
    assert int(free.argmax()) == 9 and free[[1, 2, 5, 30, 31, 38, *range(40, VOCAB)]].isinf().all()
    assert rules.mean_logprob([-1.0, -2.0, -3.0]) == pytest.approx(-3.0 + float(rules.shifts[2]))


@pytest.mark.parametrize(
    ("ids", "segments", "advance"),
    [
        ([40, 3, 44, 44, 5, 48, 48], [(0, 8, [40, 3, 44]), (8, 16, [44, 5, 48])], 16),
        ([40, 3, 44, 44, 5, 6], [(0, 8, [40, 3, 44])], 8),  # the rest is decoded again
        ([40, 3, 44, 46, 5, 49], [(0, 8, [40, 3, 44]), (12, 18, [46, 5, 49])], 100),  # nothing after the end
        ([41, 3, 4, 49], [(0, 18, [41, 3, 4, 49])], 100),
        ([40, 3, 4], [(0, 100, [40, 3, 4])], 100),
        ([], [(0, 100, [])], 100),
    ],
)
def test_segments_end_at_pairs_of_timestamps(ids: list[int], segments: list, advance: int) -> None:
    assert split_segments(ids, 40, frames=100, stride=2) == (segments, advance)
