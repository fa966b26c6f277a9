"""Smaller caches return numbers within the bound of their format, or those of a dense mask, in any chunks."""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from regard.engine.caches import RULES, SMALLEST
from regard.engine.stores.arrays import PlainArrays, QuantizedArrays
from regard.engine.stores.base import Store
from regard.kernels.attention.mask import Causal
from regard.kernels.attention.patterns.window import Window
from regard.parts.state import PerToken
from regard.verification.laws.eviction import attend_to_kept
from regard.verification.laws.memory import chunks
from regard.verification.outcome import Outcome, broken, compared, difference, not_applicable, refused
from regard.verification.trial import Trial

QUANTIZED = ("int8", "fp8", "int4:3")
NO_KEYS = "no layer keeps keys and values"


def quantized(trial: Trial) -> Outcome:
    """The first layer's keys and values are within the bound of their format, and chunks equal one chunk.

    In float32 chunks may differ in the last bit of a key, which may change its code, so they are compared in float64.
    """
    if not trial.has_state(PerToken):
        return not_applicable(NO_KEYS)
    tokens, length, errors, refusals, held = trial.inputs(1, trial.length), trial.length, [0.0], [], []
    exact = trial.open_store("contiguous", 1, slack=2 * length)
    chunks(trial, tokens, exact, [0, length])
    for cache in QUANTIZED:
        try:
            other = trial.with_cache(cache)
        except ValueError as error:
            refusals.append(error)
            continue
        store = other.open_store("contiguous", 1, slack=2 * length)
        whole = chunks(other, tokens, store, [0, length])
        if not within_bound(store, exact, length):
            return broken(f"{cache}: a number differs by more than the bound of its format")
        if trial.dtype == torch.float64:
            errors += [
                difference(chunks(other, tokens, other.open_store(kind, 1), [0, *cuts, length]), whole)
                for kind in trial.stores[:1]
                for cuts in ([length // 2], [*range(1, min(length, 4))])
            ]
        held.append(cache)
    return compared(f"{', '.join(held)}", *errors) if held else refused(refusals[0])


def within_bound(store: Store, exact: Store, length: int) -> bool:
    """Whether the arrays of the first layer with keys differ by no more than their format allows."""
    found = next(one for one in store.storages if isinstance(getattr(one, "encoding", None), QuantizedArrays))
    plain = next(one for one in exact.storages if isinstance(getattr(one, "encoding", None), PlainArrays))
    for name, array in list(plain.arrays.items())[:2]:  # a layer may compute further ones from what it reads of these
        parts = {part: x[:1, :, :length] for part, x in found.arrays.items() if part.startswith(f"{name}.")}
        error = (found.encoding.decode(name, parts) - array[:1, :, :length]).abs()
        if not (error <= found.encoding.error_bound(name, parts) * (1 + 1e-5) + 1e-30).all():
            return False
    return True


def evicting(trial: Trial) -> Outcome:
    """A cache that evicts tokens equals a dense mask of the tokens that it keeps.

    With first tokens, whose positions change, chunks equal one chunk. Tokens that are chosen by their scores are
    compared in float64, because rounding may change the choice.
    """
    if not trial.has_state(PerToken):
        return not_applicable(NO_KEYS)
    if trial.windows():
        return not_applicable("a layer has a window of its own")
    checks, errors, refusals, held = {"by age": evicts_by_age}, [0.0], [], []
    if trial.dtype == torch.float64:
        checks["by scores"] = evicts_by_scores
    for name, check in checks.items():
        try:
            errors += check(trial)
            held.append(name)
        except ValueError as error:
            refusals.append(error)
    return compared(f"{', '.join(held)}", *errors) if held else refused(refusals[0])


def evicts_by_age(trial: Trial) -> list[float]:
    tokens, length = trial.inputs(2, trial.length), trial.length
    window = max(1, length // 3)
    newest, with_first = trial.with_cache(f"window:{window}"), trial.with_cache(f"sinks:1+{window}")
    with dense_mask(trial.model, window):
        expected = trial.whole(tokens)
    cuts = [[0, length], [0, length // 2, length // 2 + 1, length]]
    errors = [
        difference(chunks(newest, tokens, newest.open_store(kind, 2), cut), expected)
        for kind in trial.stores
        for cut in cuts
    ]
    first: list[Tensor] = [chunks(with_first, tokens, with_first.open_store("contiguous", 2), cut) for cut in cuts]
    return [*errors, difference(*first)]


def evicts_by_scores(trial: Trial) -> list[float]:
    tokens, length = trial.inputs(2, trial.length), trial.length
    prompt, errors = 2 * length // 3, []
    for name in RULES:
        budget = max(SMALLEST, length // 3)
        other = trial.with_cache(f"{name}:{budget}")
        with attend_to_kept(trial.model, RULES[name](budget), prompt):
            expected = trial.whole(tokens)
        for cuts in (
            [0, length],
            [0, prompt - 1, prompt + 1, length],
            [0, length // 2, *range(length // 2 + 1, length + 1)],
        ):
            store = other.open_store("contiguous", 2)
            for row in range(2):
                store.admit(row, range(length), prompt=prompt)
            errors.append(difference(chunks(other, tokens, store, cuts), expected))
    return errors


@contextmanager
def dense_mask(model: nn.Module, window: int) -> Generator[None]:
    """Causal layers have a window."""
    layers = [module for module in model.modules() if type(getattr(module, "mask", None)) is Causal]
    try:
        for module in layers:
            vars(module)["mask"] = Window(window)
        yield
    finally:
        for module in layers:
            vars(module)["mask"] = Causal()
