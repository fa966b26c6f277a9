"""Log-probabilities of the tokens of prompts, computed with the forwards that prefill them.

The hidden state of position t gives the distribution of token t + 1. The head runs over at most CHUNK positions at a
time, because the logits of a long prompt, (L, V), need more memory than its keys and values.
"""

from typing import Any

from torch import Tensor

from regard.engine.request import Request
from regard.engine.sampling import best_of, log_softmax, with_best

CHUNK = 256


def record_prompt_logprobs(model: Any, hidden: Tensor, batch: list[tuple[Request, int]]) -> None:
    """Append to `prompt_logprobs` of the requests that ask for them. hidden: (B, L, D) of the tokens of the batch."""
    for states, (request, length) in zip(hidden, batch, strict=True):
        count = request.sampling.prompt_logprobs
        if count is None:
            continue
        known = len(request.prompt_logprobs)  # of a preempted request, which is computed again
        assert request.cached <= known or request.cached >= len(request.ids) - 1, "a prefix was not computed"
        stop = min(length, len(request.ids) - 1 - request.cached)
        for start in range(known - request.cached, stop, CHUNK):
            end = min(start + CHUNK, stop)
            logprobs = log_softmax(model.logits(states[start:end]))  # (n, V)
            ids = request.ids[request.cached + start + 1 : request.cached + end + 1]
            chosen = logprobs[range(len(ids)), ids]  # (n,)
            best = [tensor.tolist() for tensor in best_of(chosen, logprobs, count)] if count else []
            request.prompt_logprobs += with_best(ids, chosen.tolist(), best, [count] * len(ids))
