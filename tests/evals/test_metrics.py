"""Metrics of outputs, against cases that are computed by hand."""

import math

import pytest

from regard.evals.metrics import (
    Estimate,
    best,
    exact_match,
    f1,
    mean,
    normalize,
    normalized_match,
    ratio,
    rouge_l,
)


def test_matches_and_what_they_ignore() -> None:
    assert exact_match(" Paris\n", "Paris") == 1 and exact_match("paris", "Paris") == 0
    assert normalize("The  cat's, an A-team!") == "cats ateam"
    assert normalized_match("The Paris.", "paris") == 1 and normalized_match("Paris, France", "Paris") == 0


@pytest.mark.parametrize(
    ("output", "reference", "expected"),
    [
        ("the cat sat", "cat sat down", 2 * 2 / (2 + 3)),  # without the article: P = 2/2, R = 2/3
        ("cat cat cat", "cat dog", 2 * 1 / (3 + 2)),  # a word counts as often as in both
        ("dog", "cat", 0),
        ("the", "", 1),  # nothing is left of both
        ("", "cat", 0),
    ],
)
def test_f1_of_words(output: str, reference: str, expected: float) -> None:
    assert f1(output, reference) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("output", "reference", "expected"),
    [
        ("police kill the gunman", "police killed the gunman", 3 / 4),  # Lin 2004: P = R = 3/4
        ("the gunman kill police", "police killed the gunman", 2 / 4),
        ("a b c d e", "b x d e", 2 * 3 / (5 + 4)),
        ("a, b!", "A-B", 1),
        ("", "a", 0),
        ("?", "!", 0),
    ],
)
def test_rouge_l(output: str, reference: str, expected: float) -> None:
    assert rouge_l(output, reference) == pytest.approx(expected)


def test_the_best_of_several_references_counts() -> None:
    assert best(f1, "red box", ("blue", "red")) == pytest.approx(2 / 3)


def test_a_mean_has_the_standard_error_of_its_sample() -> None:
    assert mean([1, 0, 1, 1]) == pytest.approx((0.75, math.sqrt((3 * 0.25**2 + 0.75**2) / 3 / 4)))
    assert mean([0.5]) == Estimate(0.5, None)


def test_a_ratio_is_one_of_sums() -> None:
    value, error = ratio([1, 5], [1, 3])  # 6/4; residuals -1/2 and 1/2
    assert value == 1.5 and error == pytest.approx(math.sqrt((0.25 + 0.25) * 2 / 1) / 4)
    assert ratio([2, 4, 6], [1, 2, 3]) == pytest.approx((2, 0))
