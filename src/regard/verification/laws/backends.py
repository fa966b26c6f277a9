"""Every attention backend agrees with the reference in all cases that it does not refuse."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from regard.kernels.attention import BACKENDS
from regard.kernels.attention.arguments import ScoreOptions, describe
from regard.layout import TokenLayout
from regard.verification.laws.batch import fill_valid_slots
from regard.verification.laws.memory import chunks
from regard.verification.outcome import Outcome, compared, difference, not_applicable
from regard.verification.trial import Trial


def backends(trial: Trial) -> Outcome:
    attentions = [module for module in trial.model.modules() if "attend" in vars(module)]
    if not attentions:
        return not_applicable("no layer computes attention scores")
    with use_attend(attentions, BACKENDS["reference"].attend):
        expected = outputs(trial)
    errors, compared_backends = [0.0], []
    for name in BACKENDS.keys() - {"reference"}:
        used: list[bool] = []
        with use_attend(attentions, backend_or_reference(name, used)):
            errors.append(difference(outputs(trial), expected))
        if any(used):
            compared_backends.append(name)
    return compared(f"{', '.join(sorted(compared_backends)) or 'none'} against reference", *errors)


def outputs(trial: Trial) -> Tensor:
    """(N, V) outputs of whole sequences, of a padded batch, and of chunks with a store, as far as they apply."""
    length = trial.length
    inputs = trial.inputs(2, length)
    results = [trial.whole(inputs).flatten(0, 1)]
    if "padding" not in trial.lacks:
        layout, valid = trial.padded([length, length // 2], length, left=True, consecutive=True)
        results.append(trial.whole(fill_valid_slots(inputs, valid), layout)[valid])
    if "memory" not in trial.lacks:
        cuts = [0, length // 2, length - 1, length]
        results.append(chunks(trial, inputs, trial.open_store("contiguous", 2), cuts).flatten(0, 1))
    return torch.cat(results)


@contextmanager
def use_attend(attentions: list[nn.Module], attend: Callable[..., Tensor]) -> Generator[None]:
    originals = [vars(module)["attend"] for module in attentions]
    try:
        for module in attentions:
            vars(module)["attend"] = attend
        yield
    finally:
        for module, original in zip(attentions, originals, strict=True):
            vars(module)["attend"] = original


def backend_or_reference(name: str, used: list[bool]) -> Callable[..., Tensor]:
    """An `attend` that calls the backend, or the reference if the backend does not support the call.

    Each call appends to `used` whether the backend ran.
    """
    backend, reference = BACKENDS[name], BACKENDS["reference"]

    def attend(q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, scores: ScoreOptions) -> Tensor:
        used.append(backend.unsupported_reason(describe(q, k, v, layout, scores)) is None)
        return (backend if used[-1] else reference).attend(q, k, v, layout, scores)

    return attend
