"""A setting out of its range is refused with its value, the rule and a remedy."""

import math

import pytest

from regard.engine.request import Request, Sampling

WRONG = [
    {"max_new": 0},
    {"max_new": 1.5},
    {"max_new": True},
    {"temperature": -0.1},
    {"temperature": math.nan},
    {"temperature": math.inf},
    {"temperature": "hot"},
    {"top_k": -1},
    {"top_k": 2.0},
    {"top_k": 2**63},
    {"top_p": 0.0},
    {"top_p": 1.01},
    {"top_p": math.nan},
    {"min_p": -0.1},
    {"min_p": 1.1},
    {"repetition_penalty": 0.0},
    {"repetition_penalty": math.inf},
    {"presence_penalty": 2.1},
    {"frequency_penalty": math.nan},
    {"seed": -1},
    {"seed": 2**64},
    {"seed": 1.0},
    {"stop_ids": [1]},
    {"stop_ids": (-1,)},
    {"stop_ids": ("a",)},
    {"suppress_ids": (-1,)},
    {"forced_bos_id": -1},
    {"forced_eos_id": "a"},
    {"top_logprobs": -1},
    {"top_logprobs": None},
]


@pytest.mark.parametrize("settings", WRONG, ids=str)
def test_wrong_settings_are_refused(settings) -> None:
    (name,) = settings
    with pytest.raises(ValueError, match=rf"^{name}=.* must be "):
        Sampling(**settings)


def test_valid_settings_are_accepted() -> None:
    Sampling(max_new=1, temperature=0, top_k=1, top_p=1, min_p=1, seed=2**64 - 1, stop_ids=(0, 5), top_logprobs=20)
    Sampling(repetition_penalty=0.5, presence_penalty=-2, frequency_penalty=2)


def test_requests_without_a_seed_draw_different_ones() -> None:
    first, second = Request((1,), Sampling()), Request((1,), Sampling())
    assert first.seed != second.seed
    assert Request((1,), Sampling(seed=0)).seed == 0
