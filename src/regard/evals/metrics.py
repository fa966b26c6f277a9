"""Metrics of outputs against references, and means with their standard errors.

    exact_match       the output equals a reference; both without the white space around them
    normalized_match  the same after `normalize`: lower case, without punctuation, articles and repeated white space
    f1                of the words of both, normalized, counted as often as they occur (SQuAD; Rajpurkar et al. 2016)
    rouge_l           F-measure of the longest common subsequence of their words, which are letters and digits in lower
                      case (Lin 2004)

If there are several references, an output has the value of the best.
"""

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

ARTICLES = re.compile(r"\b(a|an|the)\b")
NOT_IN_WORDS = re.compile(r"[^a-z0-9]+")
PUNCTUATION = str.maketrans("", "", string.punctuation)


class Estimate(NamedTuple):
    value: float
    error: float | None  # the standard error; None: it cannot be estimated from one example


def mean(values: Sequence[float]) -> Estimate:
    """The standard error is that of the sample, with n - 1 degrees of freedom."""
    count, average = len(values), math.fsum(values) / len(values)
    if count < 2:
        return Estimate(average, None)
    variance = math.fsum((value - average) ** 2 for value in values) / (count - 1)
    return Estimate(average, math.sqrt(variance / count))


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Σ numerators / Σ denominators over documents; the error is that of a ratio estimator over documents."""
    count, total = len(numerators), math.fsum(denominators)
    value = math.fsum(numerators) / total
    if count < 2:
        return Estimate(value, None)
    squares = math.fsum((n - value * d) ** 2 for n, d in zip(numerators, denominators, strict=True))
    return Estimate(value, math.sqrt(squares * count / (count - 1)) / total)


def normalize(text: str) -> str:
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def exact_match(output: str, reference: str) -> float:
    return float(output.strip() == reference.strip())


def normalized_match(output: str, reference: str) -> float:
    return float(normalize(output) == normalize(reference))


def f1(output: str, reference: str) -> float:
    found, wanted = normalize(output).split(), normalize(reference).split()
    if not found or not wanted:
        return float(found == wanted)
    return f_measure(sum((Counter(found) & Counter(wanted)).values()), len(found), len(wanted))


def rouge_l(output: str, reference: str) -> float:
    found, wanted = words(output), words(reference)
    return f_measure(common_subsequence(found, wanted), len(found), len(wanted))


def words(text: str) -> list[str]:
    return NOT_IN_WORDS.sub(" ", text.lower()).split()


def f_measure(common: int, found: int, wanted: int) -> float:
    """2 P R / (P + R) with precision P = common / found and recall R = common / wanted."""
    return 2 * common / (found + wanted) if common else 0.0


def common_subsequence(one: Sequence[str], other: Sequence[str]) -> int:
    """The length of the longest common subsequence."""
    lengths = [0] * (len(other) + 1)
    for word in one:
        diagonal = 0  # lengths[i] before this word
        for i, candidate in enumerate(other):
            diagonal, lengths[i + 1] = (
                lengths[i + 1],
                diagonal + 1 if word == candidate else max(lengths[i], lengths[i + 1]),
            )
    return lengths[-1]


OUTPUT_METRICS: dict[str, Callable[[str, str], float]] = {
    "exact_match": exact_match,
    "normalized_match": normalized_match,
    "f1": f1,
    "rouge_l": rouge_l,
}


def best(metric: Callable[[str, str], float], output: str, references: Sequence[str]) -> float:
    return max(metric(output, reference) for reference in references)
