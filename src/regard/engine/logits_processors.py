"""Changes to the logits of single requests: bias, custom processors, banned tokens, grammars.

They apply after penalties and before temperature and filters. Bans come last, so that no processor can undo them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.engine.grammar import allowed_tokens
from regard.engine.request import Request


def process(logits: Tensor, requests: Sequence[Request]) -> tuple[Tensor, dict[int, str]]:
    """The changed (B, V) logits, and for each row that cannot be sampled the reason."""
    if all(request.sampling.plain for request in requests):
        return logits, {}
    logits, errors = add_bias(logits, requests), {}
    for i, request in enumerate(requests):
        if request.sampling.processors:
            try:
                row = run_processors(logits[i], request)
                logits = logits.index_copy(0, torch.tensor([i], device=logits.device), row)
            except Exception as error:  # code of the caller: whatever it raises concerns this request only
                errors[i] = f"a logits processor of this request failed: {type(error).__name__}: {error}"
    logits = apply_grammars(ban(logits, requests), requests)
    for i, none_left in enumerate((logits.amax(-1) == -torch.inf).tolist()):
        if none_left:
            errors.setdefault(i, "the settings of this request allow no token here")
    return logits, errors


def add_bias(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    biases = [(i, id, bias) for i, r in enumerate(requests) for id, bias in r.sampling.logit_bias.items()]
    if not biases:
        return logits
    rows, ids, values = zip(*biases, strict=True)
    index = torch.tensor([rows, ids], device=logits.device)
    return logits.index_put(tuple(index), logits.new_tensor(values), accumulate=True)


def run_processors(row: Tensor, request: Request) -> Tensor:
    """(V,) -> (1, V) the logits after the processors of a request"""
    tokens, processed = torch.tensor(request.tokens, device=row.device), row.clone()
    for processor in request.sampling.processors:
        processed = processor(tokens.clone(), processed)
        if not isinstance(processed, Tensor) or processed.shape != row.shape:
            found = tuple(processed.shape) if isinstance(processed, Tensor) else type(processed).__name__
            raise ValueError(f"it returned {found}; it must return logits of shape {tuple(row.shape)}")
    if bool(((processed != processed) | (processed == torch.inf)).any()):
        raise ValueError("it returned logits that are NaN or infinite; use -inf to exclude a token")
    return processed.to(row).unsqueeze(0)


def ban(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    vocab = logits.shape[-1]  # a stop id may be a token that the model does not have
    banned = [(i, id) for i, request in enumerate(requests) for id in request.banned_ids if id < vocab]
    if not banned:
        return logits
    return logits.index_put(tuple(torch.tensor(banned, device=logits.device).T), logits.new_tensor(-torch.inf))


def apply_grammars(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    matchers = {i: request.matcher for i, request in enumerate(requests) if request.matcher is not None}
    if not matchers:
        return logits
    allowed = allowed_tokens([m.allowed() for m in matchers.values()], logits.shape[-1], logits.device)
    rows = torch.tensor(list(matchers), device=logits.device)
    return logits.index_copy(0, rows, logits[rows].masked_fill(~allowed, -torch.inf))
