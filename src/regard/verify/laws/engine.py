"""What the engine says is what the model says: greedy tokens and their log-probabilities, also after preemption.

The difference is how far a chosen token's logit lies under the best one, and how far its log-probability is off, both
by one plain forward over what was said. So a tie that rounding breaks otherwise is no difference.
"""

import torch

from regard.engine.engine import Engine
from regard.engine.request import Request, Sampling
from regard.verify.outcome import Outcome, broken, compared
from regard.verify.trial import BLOCK, STORES, Trial


def greedy(trial: Trial) -> Outcome:
    errors, prompts = [], sizes(trial)
    for store in STORES:
        engine = Engine(trial.model, rows=2, capacity=trial.length, store=store, chunk=5)
        errors += [apart(trial, request) for request in run(engine, trial, prompts)]
    return compared(f"prompts of {', '.join(map(str, prompts))}", *errors)


def preempted(trial: Trial) -> Outcome:
    """Blocks for little more than one text: the younger ones lose their memory and read everything again."""
    blocks = -(-min(trial.length, 3 + trial.steps) // BLOCK) + 1
    engine = Engine(trial.model, rows=3, capacity=trial.length, blocks=blocks, block=BLOCK, chunk=5)
    requests = run(engine, trial, [1, 2, 3])
    times = engine.metrics()["preemptions"]
    if times == 0:
        return broken("nobody was preempted, though room was short")
    return compared(f"{times} preemptions", *(apart(trial, request) for request in requests))


def sizes(trial: Trial) -> list[int]:
    return [1, trial.length // 3, trial.length // 2, trial.length - 2]


def run(engine: Engine, trial: Trial, prompts: list[int]) -> list[Request]:
    """Every prompt as far as the trial goes, all at once."""
    new = min(trial.length, trial.steps)
    requests = [
        engine.submit(trial.text(size, seed=20 + i).tolist(), Sampling(max_new=new, temperature=0))
        for i, size in enumerate(prompts)
    ]
    while not engine.idle:
        engine.step()
    for request in requests:
        if request.error is not None:
            raise ValueError(request.error)
    return requests


def apart(trial: Trial, request: Request) -> float:
    tokens = torch.tensor([request.tokens[:-1]], device=trial.device)
    logits = trial.whole(tokens)[0, len(request.ids) - 1 :]  # (new, V)
    said = torch.tensor([token.id for token in request.new], device=trial.device).unsqueeze(-1)
    under = logits.amax(-1) - logits.gather(-1, said).squeeze(-1)  # (new,)
    logprobs = torch.tensor([token.logprob for token in request.new], dtype=logits.dtype, device=trial.device)
    off = (logits.log_softmax(-1).gather(-1, said).squeeze(-1) - logprobs).abs()
    return (torch.maximum(under, off).amax() / logits.abs().amax().clamp_min(1.0)).item()
