"""A forward with a store equals one over the whole sequence: cached, chunked, paged, rewound and forked."""

from dataclasses import replace

import torch

from regard.engine.stores import STORES
from regard.engine.stores.base import CannotRewind, Store
from regard.parts.state import FixedSize
from regard.verification.outcome import Outcome, broken, compared, difference, not_applicable
from regard.verification.trial import BLOCK, Trial

LONG = 80  # more than a chunk of any recurrence


def cached(trial: Trial) -> Outcome:
    """Decoding one token per step equals one forward over the whole sequence."""
    tokens = trial.inputs(2, trial.length)
    whole = trial.whole(tokens)
    errors = [difference(stepwise(trial, tokens, trial.open_store(kind, 2)), whole) for kind in trial.stores]
    return compared(f"{min(trial.steps, trial.length)} steps", *errors)


def stepwise(trial: Trial, tokens: torch.Tensor, store: Store) -> torch.Tensor:
    """The logits of all tokens: a prefix in one chunk, then the last `trial.steps` tokens one at a time."""
    length = tokens.shape[1]
    prefix = max(0, length - trial.steps)
    return chunks(trial, tokens, store, sorted({0, prefix, *range(prefix + 1, length + 1)}))


def chunks(trial: Trial, tokens: torch.Tensor, store: Store, cuts: list[int]) -> torch.Tensor:
    """The logits of all tokens, computed in chunks between the cuts."""
    spans = zip(cuts, cuts[1:], strict=False)
    logits = [trial.cached_forward(tokens[:, a:b], trial.layout(a, b, len(tokens)), store) for a, b in spans]
    return torch.cat(logits, 1)


def recurrent(trial: Trial) -> Outcome:
    """Single steps of a recurrence equal its parallel form, over more than one chunk."""
    if not trial.has_state(FixedSize):
        return not_applicable("no layer is a recurrence")
    tokens = trial.inputs(1, min(LONG, trial.limit), seed=2)
    length = tokens.shape[1]
    steps = stepwise(trial, tokens, trial.open_store("contiguous", 1, length))
    return compared(
        f"{length} tokens, {min(trial.steps, length)} of them in steps", difference(steps, trial.whole(tokens))
    )


def chunked(trial: Trial) -> Outcome:
    tokens = trial.inputs(2, trial.length)
    whole = trial.whole(tokens)
    errors = [
        difference(chunks(trial, tokens, trial.open_store(kind, 2), [0, cut, trial.length]), whole)
        for kind in trial.stores
        for cut in trial.cuts
    ]
    return compared(f"cut at {', '.join(map(str, trial.cuts))}", *errors)


def paged(trial: Trial) -> Outcome:
    """All stores return the same logits: they hold the same keys in the same order, in another memory layout."""
    tokens, length = trial.inputs(2, trial.length), trial.length
    cuts = sorted({0, length // 2 - 1, length // 2, length // 2 + 1, length})
    first, *others = (chunks(trial, tokens, trial.open_store(kind, 2), cuts) for kind in STORES)
    return compared("the same chunks", *(difference(other, first) for other in others))


def used_row(trial: Trial) -> Outcome:
    """A sequence in a row that was released equals the sequence in a new row."""
    old, new = trial.inputs(1, trial.length, seed=3), trial.inputs(1, trial.length // 2 + 1)
    size = new.shape[1]
    errors = []
    for kind in trial.stores:
        store = trial.open_store(kind, 1)
        trial.cached_forward(old, trial.layout(0, trial.length), store)
        store.release(0)
        assert store.reserve(0, size)
        span = -(-size // BLOCK) * BLOCK
        errors.append(difference(trial.cached_forward(new, trial.layout(0, size), store, span), trial.whole(new)))
    return compared("a row released and used again", *errors)


def rewound(trial: Trial) -> Outcome:
    """A row that is rewound to half of its sequence and continues with other tokens equals one forward over them all.

    A recurrence must refuse to rewind without a snapshot.
    """
    cut, length = trial.length // 2, trial.length
    tokens = trial.inputs(2, length)
    other = torch.cat([tokens[:, :cut], trial.inputs(2, length - cut, seed=4)], 1)
    whole = trial.whole(other)
    errors, refusals = [], []
    for kind in trial.stores:
        store = trial.open_store(kind, 2)
        trial.cached_forward(tokens[:, :cut], trial.layout(0, cut, 2), store)
        snapshots = [store.snapshot(row) for row in range(2)]
        trial.cached_forward(tokens[:, cut:], trial.layout(cut, length, 2), store)
        try:
            store.rewind(0, cut)
        except CannotRewind as error:
            refusals.append(error)
        for row, snapshot in enumerate(snapshots):
            store.rewind(row, cut, snapshot)
            assert store.reserve(row, length)
        logits = trial.cached_forward(other[:, cut:], trial.layout(cut, length, 2), store)
        errors.append(difference(logits, whole[:, cut:]))
    if trial.has_state(FixedSize) and len(refusals) < len(trial.stores):
        return broken("a recurrence was rewound without a snapshot")
    if refusals and not trial.has_state(FixedSize) and not trial.windows():
        return broken(f"refused: {refusals[0]}")
    return compared(f"to {cut} of {length} tokens{', by a snapshot' if refusals else ''}", *errors)


def forked(trial: Trial) -> Outcome:
    """A row that is forked from another equals a row that processed the whole sequence.

    Both rows continue, then the first one is released and used again.
    """
    cut, length = trial.length // 2, trial.length
    middle = (cut + length) // 2
    tokens = trial.inputs(1, length)
    other = torch.cat([tokens[:, :cut], trial.inputs(1, length - cut, seed=4)], 1)
    sequences, rows = torch.cat([tokens, other]), torch.tensor([0, 2], device=trial.device)
    whole = trial.whole(sequences)
    errors = []
    for kind in trial.stores:
        store = trial.open_store(kind, 3)
        store.release(2)
        trial.cached_forward(tokens[:, :cut], trial.layout(0, cut), store)
        assert store.fork(0, 2, store.snapshot(0)) and store.reserve(2, length)
        layout = replace(trial.layout(cut, middle, 2), rows=rows)
        logits = trial.cached_forward(sequences[:, cut:middle], layout, store)
        errors.append(difference(logits, whole[:, cut:middle]))
        store.release(0)
        assert store.reserve(0, cut)
        trial.cached_forward(trial.inputs(1, cut, seed=5), trial.layout(0, cut), store)
        layout = replace(trial.layout(middle, length), rows=rows[1:])
        errors.append(difference(trial.cached_forward(other[:, middle:], layout, store), whole[1:, middle:]))
    return compared(f"the first {cut} of {length} tokens", *errors)


def rings(trial: Trial) -> Outcome:
    """A window over a ring buffer equals a window over all tokens, in chunks around its size and in single steps."""
    sizes = sorted(first + window for window, first in trial.windows())
    if not sizes or sizes[0] >= trial.length:
        return not_applicable(f"no layer has a window shorter than {trial.length} tokens")
    tokens, length = trial.inputs(2, trial.length), trial.length
    near_sizes = {size + offset for size in sizes for offset in (-1, 0, 1)}
    cuts = [0, *sorted(cut for cut in near_sizes if 0 < cut < length), length]
    errors = []
    for kind in trial.stores:
        for decode in (lambda store: chunks(trial, tokens, store, cuts), lambda store: stepwise(trial, tokens, store)):
            ring, all_tokens = trial.open_store(kind, 2), trial.open_store(kind, 2, slack=length * 2)
            errors.append(difference(decode(ring), decode(all_tokens)))
    return compared(f"windows of {', '.join(map(str, sizes))}", *errors)
