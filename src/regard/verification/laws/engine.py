"""The engine's greedy tokens and log-probabilities equal those of a plain forward, also after preemption.

The difference is the larger of two errors, both relative to one forward over the whole sequence: the gap between the
largest logit and the logit of the generated token, and the error of its log-probability. For a tie the gap is 0.
"""

from collections.abc import Sequence
from functools import partial

import torch

from regard.engine.engine import Engine
from regard.engine.inputs import decoder_of
from regard.engine.request import Draft, Request, Sampling
from regard.engine.speculation.medusa import Medusa
from regard.engine.stores.paged import Paged
from regard.models.decoder import DecoderModule
from regard.models.medusa import MedusaHeads
from regard.verification.outcome import Outcome, broken, compared, not_applicable
from regard.verification.trial import BLOCK, Trial


def greedy(trial: Trial) -> Outcome:
    """Greedy decoding in a batch with every store."""
    errors, prompts = [], prompt_lengths(trial)
    for store in trial.stores:
        engine = Engine(
            trial.model,
            rows=2,
            capacity=trial.length,
            source_capacity=trial.source_length or None,
            store=store,
            chunk=5,
        )
        errors += [error_of(trial, request) for request in run(engine, trial, prompts)]
    return compared(f"prompts of {', '.join(map(str, prompts))}", *errors)


def preempted(trial: Trial) -> Outcome:
    """With blocks for little more than one sequence, later requests are preempted and recomputed."""
    blocks = -(-min(trial.length, 3 + trial.steps) // BLOCK) + 1
    store = partial(Paged, blocks=blocks, block=BLOCK)
    engine = Engine(trial.model, rows=3, capacity=trial.length, store=store, chunk=5)
    requests = run(engine, trial, [1, 2, 3])
    preemptions = engine.metrics()["preemptions"]
    if preemptions == 0:
        return broken("no request was preempted, though there were too few blocks")
    return compared(f"{preemptions} preemptions", *(error_of(trial, request) for request in requests))


def prefixes(trial: Trial) -> Outcome:
    """A prompt, one that has its first half, and the first again, which takes all but its end from the store."""
    if trial.source_length:
        return not_applicable("requests with a source share no prefix")
    if trial.length < 2 * BLOCK + 2:
        return not_applicable(f"sequences of {trial.length} tokens are too short to share two blocks")
    store = partial(Paged, block=BLOCK, blocks=64, states=64)  # space for all of three prompts
    engine = Engine(trial.model, rows=1, capacity=trial.length, store=store, chunk=BLOCK)
    ids, other = (trial.inputs(trial.length - 1, seed=seed).tolist() for seed in (20, 21))
    half = len(ids) // 2 // BLOCK * BLOCK
    prompts = [ids, ids[:half] + other[half:], ids]
    requests = [request for prompt in prompts for request in run_all(engine, trial, [prompt])]
    hits, expected = engine.metrics()["prefix_hit_tokens"], half + (len(ids) - 1) // BLOCK * BLOCK
    if hits != expected:
        return broken(f"{hits} tokens were reused, not {expected}")
    return compared(f"{hits} reused tokens", *(error_of(trial, request) for request in requests))


def speculative(trial: Trial) -> Outcome:
    """Two drafts, one with some wrong tokens, in a batch with every store; and those of untrained heads."""
    errors, prompts = [], prompt_lengths(trial)
    open_engine = partial(
        Engine, trial.model, rows=8, capacity=trial.length, source_capacity=trial.source_length or None, chunk=5
    )
    plain = run(open_engine(), trial, prompts)
    drafter = PartlyWrong([request.tokens for request in plain])
    for store in trial.stores:
        engine = open_engine(store=store, speculation=drafter, draft_tokens=3)
        errors += [error_of(trial, request) for request in run(engine, trial, prompts)]
    if not drafter.proposed:
        return not_applicable(f"sequences of {trial.length} tokens are too short for a draft")
    heads = MedusaHeads.of(decoder_of(trial.model).spec, heads=2, shared=True).build(seed=0)  # they read hidden states
    engine = open_engine(speculation=Medusa(heads, chains=2), draft_tokens=2)
    errors += [error_of(trial, request) for request in run(engine, trial, prompts)]
    return compared(f"{drafter.proposed} tokens of drafts", *errors)


class PartlyWrong:
    """Proposes the continuations of known sequences, in which every third token is replaced, then the right ones."""

    chains = 2

    def __init__(self, sequences: list[list[int]]):
        self.sequences, self.proposed = sequences, 0

    def open(self, target: DecoderModule, rows: int, capacity: int) -> None:
        pass

    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[Draft]:
        return [self.draft(request.tokens, length) for request, length in zip(requests, lengths, strict=True)]

    def draft(self, tokens: list[int], length: int) -> Draft:
        size = len(tokens)
        known = next((ids[size : size + length] for ids in self.sequences if ids[:size] == tokens), [])
        ids = [id if (size + i) % 3 else tokens[0] for i, id in enumerate(known)]
        self.proposed += len(ids)
        return Draft(ids, others=[known] if ids != known else [])

    def adopt(self, request: Request, other: Request) -> None:
        pass


def prompt_lengths(trial: Trial) -> list[int]:
    return [1, trial.length // 3, trial.length // 2, trial.length - 2]


def run(engine: Engine, trial: Trial, lengths: list[int]) -> list[Request]:
    """Generate from prompts of these lengths in one batch; returns the finished requests."""
    return run_all(engine, trial, [trial.inputs(size, seed=20 + i).tolist() for i, size in enumerate(lengths)])


def run_all(engine: Engine, trial: Trial, prompts: list[list[int]]) -> list[Request]:
    sampling = Sampling(max_new=min(trial.length, trial.steps), temperature=0)
    requests = [engine.submit(ids, sampling, trial.source_of(ids)) for ids in prompts]
    while not engine.idle:
        engine.step()
    for request in requests:
        if request.error is not None:
            raise ValueError(request.error)
    return requests


def error_of(trial: Trial, request: Request) -> float:
    tokens = torch.tensor([request.tokens[:-1]], device=trial.device)
    logits = trial.whole(tokens)[0, len(request.ids) - 1 :]  # (new, V)
    generated = torch.tensor([token.id for token in request.new], device=trial.device).unsqueeze(-1)
    gap = logits.amax(-1) - logits.gather(-1, generated).squeeze(-1)  # (new,)
    logprobs = torch.tensor([token.logprob for token in request.new], dtype=logits.dtype, device=trial.device)
    logprob_error = (logits.log_softmax(-1).gather(-1, generated).squeeze(-1) - logprobs).abs()
    return (torch.maximum(gap, logprob_error).amax() / logits.abs().amax().clamp_min(1.0)).item()
