"""Activations recorded while the engine decodes equal those of one forward; other requests are not disturbed."""

import pytest
import torch

from regard.engine.engine import Engine
from regard.engine.request import Sampling
from regard.engine.speculation.draft_length import DraftCosts
from regard.lens import attention_maps, record, record_generation
from tests.engine.drafters import medusa
from tests.laws import MODELS, build, random_ids

GREEDY = Sampling(max_new=9, temperature=0)


def prompts(count: int) -> list[list[int]]:
    return [random_ids(5 + 4 * i, seed=i).tolist() for i in range(count)]


@torch.no_grad()
@pytest.mark.parametrize("name", ["grouped-query", "mamba2 and a window", "linear", "latent"])
@pytest.mark.parametrize("store", ["paged", "contiguous"])
def test_recorded_activations_equal_those_of_one_forward(name: str, store: str) -> None:
    model, (prompt, *others) = build(MODELS[name]), prompts(4)
    patterns = ["stack.blocks.?", "*.body.?", "*.neurons"]
    patterns += [] if name == "linear" else ["*.body.pattern", "*.body.scores"]
    engine = Engine(model, rows=4, capacity=64, store=store, chunk=4)
    for other in others:
        engine.submit(other, GREEDY)
    found = record_generation(engine, prompt, GREEDY, patterns)
    ids = torch.tensor([[*prompt, *found.tokens[:-1]]])
    with record(model, patterns) as expected:
        model(ids)
    assert set(found) == set(expected) and len(found.tokens) == 9
    for activation, x in expected.items():
        assert found[activation].shape == x[0].shape, activation
        both = found[activation], x[0]
        finite = [y.masked_fill(y == -torch.inf, -1.0) for y in both]
        assert (finite[0] - finite[1]).abs().max() <= 1e-9, activation
    assert not any(module._forward_hooks for module in model.modules()) and not engine.runner.observers


@torch.no_grad()
def test_neighbours_have_the_same_tokens_while_a_request_is_recorded() -> None:
    model, (prompt, *others) = build(MODELS["grouped-query"]), prompts(4)
    alone = [[token.id for token in Engine(model, capacity=64).generate(ids, GREEDY)] for ids in [prompt, *others]]
    engine = Engine(model, rows=3, capacity=64, chunk=8)
    requests = [engine.submit(other, GREEDY) for other in others]
    found = record_generation(engine, prompt, GREEDY, "*.pattern")
    while not engine.idle:
        engine.step()
    assert [found.tokens, *([token.id for token in request.new] for request in requests)] == alone
    maps = attention_maps(model, [*prompt, *found.tokens[:-1]])
    assert (found["stack.blocks.1.sublayers.0.body.pattern"] - maps[1]).abs().max() <= 1e-9


@torch.no_grad()
def test_a_cached_prefix_is_not_used_while_a_request_is_recorded() -> None:
    """Tokens whose keys are cached would have no activations."""
    engine, prompt = Engine(build(MODELS["grouped-query"]), capacity=64), random_ids(40, seed=9).tolist()
    first = [token.id for token in engine.generate(prompt, GREEDY)]
    request = engine.submit(prompt, GREEDY)
    while not engine.idle:
        engine.step()
    assert request.reused > 0, "the test needs a cached prefix"
    found = record_generation(engine, prompt, GREEDY, "stack.blocks.0")
    assert found.tokens == first and found["stack.blocks.0"].shape[0] == len(prompt) + 8


@torch.no_grad()
def test_drafts_are_left_out_while_a_request_is_recorded() -> None:
    """Tokens of a draft that are rejected, or accepted in another row, would be recorded too."""
    model, prompt = build(MODELS["grouped-query"]), [1, 2, 3]
    engine = Engine(model, rows=4, capacity=64, speculation=medusa(model, chains=4))
    assert engine.speculation is not None
    engine.speculation.costs = DraftCosts(1.0, 0.0)  # a draft in every step
    found = record_generation(engine, prompt, GREEDY, "*.pattern")
    assert [token.id for token in engine.generate(prompt, GREEDY)] == found.tokens
    assert engine.metrics()["accepted_draft_tokens"] > 0
    maps = attention_maps(model, [*prompt, *found.tokens[:-1]])
    assert found["stack.blocks.1.sublayers.0.body.pattern"].shape == maps[1].shape
    assert (found["stack.blocks.1.sublayers.0.body.pattern"] - maps[1]).abs().max() <= 1e-9


def test_prepared_steps_are_left_out_while_a_request_is_recorded() -> None:
    """A compiled step has no hooks."""
    engine, calls = Engine(build(MODELS["grouped-query"]), capacity=64), []
    engine.runner.compiled = lambda *args: calls.append(args) or engine.runner.decode_step(*args)
    found = record_generation(engine, [1, 2, 3], GREEDY, "stack.blocks.0")
    assert not calls and found["stack.blocks.0"].shape == (11, 24)
    assert [token.id for token in engine.generate([1, 2, 3], GREEDY)] == found.tokens and len(calls) == 8


def test_rows_of_experts_cannot_be_recorded() -> None:
    engine, sampling = Engine(build(MODELS["experts"]), capacity=64), Sampling(max_new=1)
    name = "stack.blocks.0.sublayers.1.body.experts.neurons"
    assert name not in record_generation(engine, [1, 2, 3], sampling, ["stack.blocks.0", "*.neurons"])
    with pytest.raises(ValueError, match="no activation that matches"):
        record_generation(engine, [1, 2, 3], sampling, "*.neurons")
    with pytest.raises(ValueError, match="without a row per request"):
        record_generation(engine, [1, 2, 3], sampling, name)
    assert engine.idle and not engine.runner.observers


def test_a_step_after_the_last_token_is_left_out() -> None:
    """On a GPU a step starts before the tokens of the one before it are read."""
    model, prompt = build(MODELS["grouped-query"]), [1, 2, 3]
    tokens = [token.id for token in Engine(model, capacity=64).generate(prompt, GREEDY)]
    sampling = Sampling(max_new=9, temperature=0, stop_ids=(tokens[2],))
    engine = Engine(model, capacity=64)
    engine.lag = 1
    names = ["stack.blocks.0", "*.pattern", "*.body.k"]
    found, expected = record_generation(engine, prompt, sampling, names), record(model, names)
    assert found.tokens == tokens[: tokens.index(tokens[2]) + 1]
    with torch.no_grad(), expected as activations:
        model(torch.tensor([[*prompt, *found.tokens[:-1]]]))
    assert {name: x.shape for name, x in found.items()} == {name: x.shape[1:] for name, x in activations.items()}


def test_engines_whose_modules_call_no_hooks_are_refused() -> None:
    engine = Engine(build(MODELS["grouped-query"]), capacity=64)
    engine.runner.plain = build(MODELS["grouped-query"])  # as with batch_invariant, which runs on GPUs only
    with pytest.raises(ValueError, match="batch_invariant"):
        record_generation(engine, [1, 2, 3], GREEDY, "stack.blocks.0")
    assert engine.idle
