"""A setting out of its range is refused with its value, the rule and a remedy."""

import math
from dataclasses import fields

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
    {"seed": -(2**63) - 1},
    {"seed": True},
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
    {"prompt_logprobs": -1},
    {"prompt_logprobs": True},
    {"typical_p": 0.0},
    {"min_new": -1},
    {"min_new": 129},
    {"ignore_eos": 1},
    {"stop_sequences": (1, 2)},
    {"stop_sequences": ((),)},
    {"bad_words": [(1,)]},
    {"bad_words": ((-1,),)},
    {"logit_bias": [1]},
    {"logit_bias": {"5": 1.0}},
    {"logit_bias": {5: math.nan}},
    {"logit_bias": {5: math.inf}},
    {"logit_bias": {5: "a"}},
    {"processors": [len]},
    {"processors": (1,)},
]


@pytest.mark.parametrize("settings", WRONG, ids=str)
def test_wrong_settings_are_refused(settings) -> None:
    (name,) = settings
    with pytest.raises(ValueError, match=rf"^{name}=.* must be "):
        Sampling(**settings)


def test_valid_settings_are_accepted() -> None:
    Sampling(max_new=1, temperature=0, top_k=1, top_p=1, min_p=1, seed=2**64 - 1, stop_ids=(0, 5), top_logprobs=20)
    Sampling(repetition_penalty=0.5, presence_penalty=-2, frequency_penalty=2)
    Sampling(logit_bias={3: -math.inf, 4: 100}, bad_words=((1,), (2, 3)), stop_sequences=((4, 5),), prompt_logprobs=0)


def test_only_some_settings_are_plain() -> None:
    """A new setting has to be added here, and to `plain` if it affects the choice of tokens."""
    plain = {
        "max_new": 5, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.1,
        "presence_penalty": 1.0, "frequency_penalty": 1.0, "seed": 3, "stop_ids": (1,), "ignore_eos": True,
        "prompt_logprobs": 2,
    }  # fmt: skip
    other = {
        "suppress_ids": (1,), "forced_bos_id": 0, "forced_eos_id": 0, "top_logprobs": 1, "typical_p": 0.5, "min_new": 1,
        "stop_sequences": ((1,),), "bad_words": ((1,),), "logit_bias": {0: 1.0}, "processors": (lambda _, x: x,),
    }  # fmt: skip
    assert {field.name for field in fields(Sampling)} == plain.keys() | other.keys() | {"grammar"}
    assert Sampling(**plain).plain and hash(Sampling(**plain)) == hash(Sampling(**plain))
    assert not any(Sampling(**{name: value}).plain for name, value in other.items())


def test_ignore_eos_removes_the_stop_ids() -> None:
    assert Sampling(stop_ids=(3,), ignore_eos=True).stop_ids == ()


def test_requests_without_a_seed_draw_different_ones() -> None:
    for seed in (None, -1):
        first, second = Request((1,), Sampling(seed=seed)), Request((1,), Sampling(seed=seed))
        assert first.seed != second.seed
    assert Request((1,), Sampling(seed=0)).seed == 0
    assert Request((1,), Sampling(seed=-2)).seed == 2**64 - 2
