"""Every attention backend gives what the reference gives, in each case that it takes; what it refuses, it says."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from regard.kernels.attention import BACKENDS
from regard.kernels.attention.score_options import ScoreOptions
from regard.layout import TokenLayout
from regard.verify.laws.batch import flush
from regard.verify.laws.memory import pieces
from regard.verify.outcome import Outcome, compared, difference, not_applicable
from regard.verify.trial import Trial


def backends(trial: Trial) -> Outcome:
    """A whole text, a padded batch, and a text in chunks through a store."""
    attentions = [module for module in trial.model.modules() if "attend" in vars(module)]
    if not attentions:
        return not_applicable("no layer computes attention scores")
    with computed_by(attentions, BACKENDS["reference"].attend):
        expected = outputs(trial)
    errors, took = [0.0], []
    for name in BACKENDS.keys() - {"reference"}:
        taken: list[bool] = []
        with computed_by(attentions, where_it_can(name, taken)):
            errors.append(difference(outputs(trial), expected))
        if any(taken):
            took.append(name)
    return compared(f"{', '.join(sorted(took)) or 'none'} beside reference", *errors)


def outputs(trial: Trial) -> Tensor:
    """(N, V) in every way in which attention is asked for."""
    length = trial.length
    inputs = trial.text(2, length)
    found = [trial.whole(inputs).flatten(0, 1)]
    if "padding" not in trial.lacks:
        layout, valid = trial.padded([length, length // 2], length, left=True, close=True)
        found.append(trial.whole(flush(inputs, valid), layout)[valid])
    if "memory" not in trial.lacks:
        chunks = pieces(trial, inputs, trial.open("contiguous", 2), [0, length // 2, length - 1, length])
        found.append(chunks.flatten(0, 1))
    return torch.cat(found)


@contextmanager
def computed_by(attentions: list[nn.Module], attend: Callable[..., Tensor]) -> Generator[None]:
    before = [vars(module)["attend"] for module in attentions]
    try:
        for module in attentions:
            vars(module)["attend"] = attend
        yield
    finally:
        for module, own in zip(attentions, before, strict=True):
            vars(module)["attend"] = own


def where_it_can(name: str, taken: list[bool]) -> Callable[..., Tensor]:
    """The backend where it takes the case, else the reference; notes which it was."""
    backend, reference = BACKENDS[name], BACKENDS["reference"]

    def attend(q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, scores: ScoreOptions) -> Tensor:
        taken.append(backend.refuses(q, k, v, layout, scores) is None)
        return (backend if taken[-1] else reference).attend(q, k, v, layout, scores)

    return attend
