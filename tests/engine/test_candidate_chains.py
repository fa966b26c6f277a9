"""Several candidate drafts per request: which chains are the best, and their verification in one forward."""

import itertools
import math
import random
from collections.abc import Sequence
from functools import partial

import pytest
import torch

from regard.engine.engine import Engine
from regard.engine.request import Draft, Request, Sampling
from regard.engine.speculation.candidate_chains import Candidates, likeliest, other_chains
from regard.engine.speculation.draft_length import DraftCosts
from regard.engine.stores import STORES
from regard.engine.stores.paged import Paged
from regard.models.decoder import DecoderModule
from tests.engine.drafters import medusa
from tests.engine.random_requests import CAPACITY, KINDS, build_variants
from tests.engine.test_speculation import GREEDY, Scripted, ids_of, run
from tests.laws import VOCAB, build


@pytest.fixture(autouse=True)
def free_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are always as long as possible, however many are rejected."""
    monkeypatch.setattr("regard.engine.speculation.speculation.COSTS", {"cpu": DraftCosts(1.0, 0.0)})


class ScriptedTree(Scripted):
    """Several candidates, each of which is right up to a random position."""

    def __init__(self, sequences: Sequence[Sequence[int]], chains: int, seed: int = 0, right: float = 0.7):
        super().__init__(sequences, seed, right=right)
        self.chains, self.adopted = chains, 0

    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[Draft]:
        drafts = super().propose(requests, lengths)
        for draft, request, length in zip(drafts, requests, lengths, strict=True):
            draft.others = [self.draft(request, length) for _ in range(self.chains - 1)]
        return drafts

    def adopt(self, request: Request, other: Request) -> None:
        assert request.row != other.row and request.tokens == other.tokens
        self.adopted += 1


class SecondIsRight(ScriptedTree):
    """Of two candidates for one request, all tokens of the first are wrong, and all of the second are right."""

    def __init__(self, tokens: Sequence[int]):
        super().__init__([], chains=2)
        self.known = list(tokens)

    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[Draft]:
        (request,), (length,) = requests, lengths
        right = self.known[len(request.tokens) :][:length]
        return [Draft([(id + 1) % VOCAB for id in right], others=[right])]


def step_all(engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sampling = GREEDY) -> list[Request]:
    requests = [engine.submit(ids, sampling) for ids in prompts]
    while not engine.idle:
        engine.step()
        engine.store.check()
    return requests


def expected_tokens(chains: Sequence[Sequence[int]], positions: Sequence[Candidates]) -> float:
    """Σ over the nodes of the tree of these chains: the probability that all tokens up to the node are right."""
    nodes = {tuple(chain[: i + 1]) for chain in chains for i in range(len(chain))}
    of = [dict(zip(*candidates, strict=True)) for candidates in positions]
    return sum(math.prod(of[i][id] for i, id in enumerate(node)) for node in nodes)


@pytest.mark.parametrize("independent", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_the_chains_are_the_best_that_leave_the_draft_once(seed: int, independent: bool) -> None:
    """Against all sets of as many chains."""
    rng = random.Random(seed)
    logits = torch.randn(rng.randint(1, 4), 9, generator=torch.Generator().manual_seed(seed)) * 2
    positions, count = likeliest(logits, 3), rng.randint(1, 3)
    draft = [candidates.ids[0] for candidates in positions]
    leaving = [
        [*draft[:i], id, *(draft[i + 1 :] if independent else [])]
        for i, candidates in enumerate(positions)
        for id in candidates.ids[1:]
    ]
    found = other_chains(positions, count, independent)
    assert len(found) == min(count, len(leaving)) and all(chain in leaving for chain in found)
    best = max(expected_tokens([draft, *chains], positions) for chains in itertools.combinations(leaving, len(found)))
    assert math.isclose(expected_tokens([draft, *found], positions), best, rel_tol=1e-6)
    gains = [expected_tokens([draft, chain], positions) for chain in found]
    assert gains == sorted(gains, reverse=True)


def test_the_likeliest_tokens_have_their_probabilities() -> None:
    (candidates,) = likeliest(torch.tensor([[0.5, 0.125, 0.25, 0.125]]).log(), 2)
    assert candidates.ids == [0, 2] and candidates.probabilities == pytest.approx([0.5, 0.25])
    assert len(likeliest(torch.zeros(1, 3), 5)[0].ids) == 3  # no more than the vocabulary has
    assert other_chains([], 3, independent=True) == []
    assert other_chains([Candidates([4], [1.0])], 3, independent=True) == []


@pytest.mark.ledger("spec.medusa")
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("kind", KINDS)
def test_candidates_with_wrong_tokens_change_nothing(kind: str, store: str) -> None:
    """Requests of different lengths whose best candidate is sometimes the first, sometimes another, sometimes none."""
    model, rng = build(KINDS[kind]), random.Random(3)
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in (1, 3, 9, 17)]
    plain = run(Engine(model, rows=4, capacity=CAPACITY, store=store), prompts, GREEDY)
    drafter = ScriptedTree([request.tokens for request in plain], chains=3)
    engine = Engine(model, rows=12, capacity=CAPACITY, store=store, speculation=drafter, draft_tokens=6)
    found = step_all(engine, prompts)
    assert ids_of(found) == ids_of(plain)
    for token, expected in zip(found[2].new, plain[2].new, strict=True):
        assert math.isclose(token.logprob, expected.logprob, abs_tol=1e-9)
    assert drafter.adopted
    assert engine.scheduler.free_rows == set(range(12))


def test_another_candidate_saves_forwards() -> None:
    """All first candidates are wrong, and all second ones right: as many forwards as with right drafts."""
    model = build(KINDS["decoder"])
    (plain,) = run(Engine(model, rows=1, capacity=CAPACITY), [[1, 2, 3]], GREEDY)
    steps = {}
    for rows in (1, 2):
        engine = Engine(model, rows=rows, capacity=CAPACITY, speculation=SecondIsRight(plain.tokens), draft_tokens=5)
        assert ids_of(step_all(engine, [[1, 2, 3]])) == ids_of([plain])
        steps[rows] = engine.metrics()["steps"]
    assert steps[1] == 24  # there is no free row for the second candidate
    assert steps[2] == 1 + math.ceil(23 / 6)  # the prompt, then six tokens per forward


@pytest.mark.parametrize("kind", ["decoder", "window", "latent"])
def test_the_cached_prefix_of_a_finished_request_is_that_of_the_accepted_candidate(kind: str) -> None:
    """A request ends in the forward of its candidates. The next request continues its tokens."""
    model, sampling = build(KINDS[kind]), Sampling(max_new=6, temperature=0)
    (plain,) = run(Engine(model, rows=1, capacity=CAPACITY), [[1, 2, 3]], sampling)
    prompt = [*plain.tokens, 4]
    (expected,) = run(Engine(model, rows=1, capacity=CAPACITY), [prompt], GREEDY)
    engine = Engine(
        model, rows=2, capacity=CAPACITY, store=partial(Paged, block=2, blocks=64),
        speculation=SecondIsRight(plain.tokens), draft_tokens=5,
    )  # fmt: skip
    assert ids_of(step_all(engine, [[1, 2, 3]], sampling)) == ids_of([plain])
    (found,) = step_all(engine, [prompt])
    assert found.reused and ids_of([found]) == ids_of([expected])
    for token, other in zip(found.new, expected.new, strict=True):
        assert math.isclose(token.logprob, other.logprob, abs_tol=1e-9)


def test_rows_are_divided_among_the_requests() -> None:
    """Other requests need all rows after some steps."""
    model, rng = build(KINDS["decoder"]), random.Random(5)
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in (2, 5, 3, 8, 4, 6)]
    plain = run(Engine(model, rows=6, capacity=CAPACITY), prompts, GREEDY)
    drafter = ScriptedTree([request.tokens for request in plain], chains=4, right=0.9)
    engine = Engine(model, rows=5, capacity=CAPACITY, speculation=drafter, draft_tokens=4)
    requests, sizes = [engine.submit(prompts[0], GREEDY)], []
    forward = engine.runner.forward
    engine.runner.forward = lambda batch: (sizes.append(len(batch)), forward(batch))[1]  # ty: ignore[invalid-assignment]
    while not engine.idle:
        engine.step()
        if len(requests) < len(prompts):
            requests.append(engine.submit(prompts[len(requests)], GREEDY))
    assert ids_of(requests) == ids_of(plain) and drafter.adopted
    assert max(sizes) <= 5 and {4} <= set(sizes)


@pytest.mark.parametrize("blocks", range(8, 16))
def test_too_few_blocks_leave_candidates_out(blocks: int) -> None:
    """Blocks run out while rows are forked, or while space for the candidates is reserved."""
    model, rng = build(KINDS["decoder"]), random.Random(5)
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in (7, 5)]
    plain = run(Engine(model, rows=2, capacity=CAPACITY), prompts, GREEDY)
    drafter = ScriptedTree([request.tokens for request in plain], chains=4)
    store = partial(Paged, block=4, blocks=blocks)
    engine = Engine(model, rows=8, capacity=32, store=store, speculation=drafter, draft_tokens=6)
    assert ids_of(step_all(engine, prompts)) == ids_of(plain)


def test_settings_that_choose_other_tokens_than_the_most_likely() -> None:
    """Biased and penalized greedy requests: a candidate that agrees with the logits may be rejected."""
    model = build(KINDS["decoder"])
    for settings in ({"logit_bias": {3: 4.0}}, {"repetition_penalty": 1.5}, {"suppress_ids": (1, 2, 5)}):
        sampling = Sampling(max_new=24, temperature=0, **settings)  # ty: ignore[invalid-argument-type]
        plain = run(Engine(model, rows=2, capacity=CAPACITY), [[1, 2, 3], [4]], sampling)
        drafter = ScriptedTree([request.tokens for request in plain], chains=3)
        engine = Engine(model, rows=8, capacity=CAPACITY, speculation=drafter, draft_tokens=5)
        assert ids_of(step_all(engine, [[1, 2, 3], [4]], sampling)) == ids_of(plain)


def test_medusa_with_more_candidates_accepts_more() -> None:
    model: DecoderModule = build(KINDS["decoder"])
    prompts = [[7, 1, 5], [2, 2]]
    per_draft = []
    for chains in (1, 4, 16):
        engine = Engine(model, rows=32, capacity=CAPACITY, speculation=medusa(model, chains=chains))
        step_all(engine, prompts)
        assert engine.speculation is not None
        per_draft.append(engine.speculation.statistics.tokens_per_draft)
    assert per_draft[0] < per_draft[1] < per_draft[2], per_draft


def test_sampled_requests_have_one_candidate() -> None:
    model = build(KINDS["decoder"])
    drafter = medusa(model, chains=4)
    engine = Engine(model, rows=8, capacity=CAPACITY, speculation=drafter)
    propose, others = drafter.propose, []

    def recorded(requests: Sequence[Request], lengths: Sequence[int]) -> list[Draft]:
        drafts = propose(requests, lengths)
        others.extend(
            (request.sampling.temperature, len(draft.others)) for request, draft in zip(requests, drafts, strict=True)
        )
        return drafts

    drafter.propose = recorded  # ty: ignore[invalid-assignment]
    for temperature in (0.0, 0.8):
        engine.submit([1, 2], Sampling(max_new=10, temperature=temperature, seed=1))
    while not engine.idle:
        engine.step()
    assert {(0.0, 3), (0.8, 0)} <= set(others) <= {(0.0, 3), (0.0, 0), (0.8, 0)}


def test_a_failed_forward_leaves_no_row_behind() -> None:
    model = build_variants("decoder")[None]
    plain = run(Engine(model, rows=2, capacity=CAPACITY), [[1, 2], [3]], GREEDY)
    engine = Engine(
        model, rows=8, capacity=CAPACITY, draft_tokens=4,
        speculation=ScriptedTree([request.tokens for request in plain], chains=3),
    )  # fmt: skip
    forward, failures = engine.runner.forward, iter([False, False, True, False, True])

    def failing(batch):
        if len(batch) > 2 and next(failures, False):
            raise RuntimeError("planted")
        return forward(batch)

    engine.runner.forward = failing  # ty: ignore[invalid-assignment]
    requests = step_all(engine, [[1, 2], [3]])
    assert next(failures, None) is None, "both failures have happened"
    assert all(request.finish == "length" for request in requests) and ids_of(requests) == ids_of(plain)
    assert engine.scheduler.free_rows == set(range(8)) and not any(engine.store.table.lengths)  # ty: ignore[unresolved-attribute]


def test_a_request_whose_candidates_need_too_much_memory_continues_without_them() -> None:
    """It is the only one, and a forward without drafts succeeds."""
    model = build(KINDS["decoder"])
    (plain,) = run(Engine(model, rows=1, capacity=CAPACITY), [[1, 2, 3]], GREEDY)
    engine = Engine(model, rows=4, capacity=CAPACITY, speculation=ScriptedTree([plain.tokens], 3), draft_tokens=4)
    forward, failures = engine.runner.forward, []

    def limited(batch):
        if len(batch) > 1:
            failures.append(batch)
            raise RuntimeError("planted")
        return forward(batch)

    engine.runner.forward = limited  # ty: ignore[invalid-assignment]
    (request,) = step_all(engine, [[1, 2, 3]])
    assert failures and request.error is None and ids_of([request]) == ids_of([plain])


@pytest.mark.parametrize("chains", [0, -1, 1.5, True])
def test_the_number_of_candidates_is_checked(chains) -> None:
    model = build(KINDS["decoder"])
    with pytest.raises(ValueError, match="chains"):
        Engine(model, rows=2, capacity=CAPACITY, speculation=ScriptedTree([], chains))
