"""Bias, banned tokens, stop sequences, processors and log-probabilities of prompts, alone and in a batch."""

import math
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from transformers import MinNewTokensLengthLogitsProcessor, NoBadWordsLogitsProcessor, SequenceBiasLogitsProcessor

from regard.engine.engine import Engine
from regard.engine.logits_processors import process
from regard.engine.prompt_logprobs import CHUNK
from regard.engine.request import GenerationError, Request, Sampling, Token
from regard.engine.stores.paged import Paged

PROMPT = [3, 9, 4, 17]
GREEDY = Sampling(max_new=20, temperature=0)


def ids_of(request: Request) -> list[int]:
    return [token.id for token in request.new]


def request_with(new: list[int], **settings) -> Request:
    request = Request(tuple(PROMPT), Sampling(**settings))
    for id in new:
        request.add(Token(id, 0.0, (), None))
    return request


def generate(engine: Engine, sampling: Sampling, ids: list[int] = PROMPT) -> list[int]:
    return [token.id for token in engine.generate(ids, sampling)]


@pytest.mark.parametrize("new", [[], [7], [7, 8], [5, 5, 7, 8]], ids=str)
def test_changes_of_logits_equal_those_of_transformers(new: list[int]) -> None:
    """Bad words may begin in the prompt, and be longer than the sequence."""
    logits, tokens = torch.randn(1, 61, dtype=torch.float64), torch.tensor([PROMPT + new])
    bad = ((30,), (7, 8), (7, 8, 9), (17, 7), (4, 17, 31), (8, 1, 2), (1, 2, 3, 4, 5, 6, 7, 8, 9, 10))
    bias = {3: 2.5, 11: -1.25, 60: -100.0}
    cases = [
        ({"bad_words": bad}, NoBadWordsLogitsProcessor([list(ids) for ids in bad])),
        ({"logit_bias": bias}, SequenceBiasLogitsProcessor([[[id], value] for id, value in bias.items()])),
        ({"min_new": 3, "stop_ids": (5, 6)}, MinNewTokensLengthLogitsProcessor(len(PROMPT), 3, [5, 6])),
    ]
    for settings, processor in cases:
        found, errors = process(logits, [request_with(new, **settings)])
        torch.testing.assert_close(found, processor(tokens, logits), rtol=0, atol=0)
        assert not errors


def test_a_bias_of_minus_infinity_excludes_a_token_and_a_large_one_forces_it(tiny) -> None:
    engine = Engine(tiny())
    best = generate(engine, GREEDY)
    assert best[0] not in generate(engine, replace(GREEDY, logit_bias={best[0]: -math.inf}))
    assert set(generate(engine, replace(GREEDY, logit_bias={45: 1e4}))) == {45}


def test_a_bias_that_changes_after_its_submission_has_no_effect(tiny) -> None:
    engine, bias = Engine(tiny()), {45: 1e4}
    request = engine.submit(PROMPT, replace(GREEDY, max_new=4, logit_bias=bias))
    bias |= {45: 0.0, 999: 1.0}
    while not engine.idle:
        engine.step()
    assert ids_of(request) == [45] * 4


def test_stop_ids_and_sequences_wait_for_min_new(tiny) -> None:
    engine = Engine(tiny())
    best = generate(engine, GREEDY)
    stop, pair = best[6], (best[5], best[6])
    sequence = generate(engine, replace(GREEDY, stop_sequences=((60, 60), pair)))
    assert tuple(sequence[-2:]) == pair and sequence == best[: len(sequence)]
    assert engine.generate(PROMPT, replace(GREEDY, stop_sequences=(pair,)))[-1].finish == "stop"
    for settings in ({"stop_ids": (stop, 999)}, {"stop_sequences": (pair, (stop,))}):
        late = generate(engine, replace(GREEDY, min_new=12, **settings))
        assert len(late) >= 12 and stop not in late[:11]  # the twelfth token may be a stop id, and is the last then
    assert generate(engine, replace(GREEDY, stop_ids=(stop,), ignore_eos=True)) == best


def test_a_stop_sequence_does_not_begin_in_the_prompt(tiny) -> None:
    engine = Engine(tiny())
    best = generate(engine, GREEDY)
    assert generate(engine, replace(GREEDY, stop_sequences=((PROMPT[-1], best[0]),))) == best


def test_bad_words_are_never_completed(tiny) -> None:
    engine = Engine(tiny())
    for seed in range(5):
        plain = Sampling(max_new=40, seed=seed, temperature=0.7)
        drawn = generate(engine, plain)
        bad = tuple((drawn[i], drawn[i + 1]) for i in range(0, 30, 3))
        found = PROMPT + generate(engine, replace(plain, bad_words=bad))
        assert not set(zip(found, found[1:], strict=False)) & set(bad)


def test_a_request_without_allowed_tokens_fails_alone(tiny) -> None:
    engine = Engine(tiny())
    neighbour = engine.submit(PROMPT, GREEDY)
    with pytest.raises(GenerationError, match="the settings of this request allow no token here"):
        generate(engine, Sampling(suppress_ids=tuple(range(61))))
    while not engine.idle:
        engine.step()
    assert ids_of(neighbour) == generate(engine, GREEDY)


def test_processors_see_the_tokens_and_change_the_logits(tiny) -> None:
    seen = []

    def next_id(tokens: Tensor, logits: Tensor) -> Tensor:
        seen.append(tokens.tolist())
        tokens.zero_()  # the arguments are copies
        return torch.full_like(logits, -math.inf).index_fill_(0, torch.tensor([len(seen)]), 0.0)

    def boost(tokens: Tensor, logits: Tensor) -> Tensor:
        assert tokens[0] == PROMPT[0]
        return logits.add_(1)

    engine = Engine(tiny())
    found = generate(engine, Sampling(max_new=4, processors=(next_id, boost), suppress_ids=(9,)))
    assert found == [1, 2, 3, 4] and seen == [PROMPT + found[:i] for i in range(4)]


def raise_error(tokens: Tensor, logits: Tensor) -> Tensor:
    raise KeyError("missing")


PROCESSORS = {
    "KeyError: 'missing'": raise_error,
    r"it returned \(3,\); it must return logits of shape \(61,\)": lambda _, logits: logits[:3],
    "it returned list": lambda _, logits: logits.tolist(),
    "NaN or infinite": lambda _, logits: logits * math.nan,
    "NaN or infinite; use -inf": lambda _, logits: logits.fill_(math.inf),
}


@pytest.mark.parametrize("message", PROCESSORS)
def test_a_failing_processor_fails_only_its_request(tiny, message: str) -> None:
    engine = Engine(tiny())
    expected = generate(engine, GREEDY)
    neighbour = engine.submit(PROMPT, GREEDY)
    with pytest.raises(GenerationError, match=f"a logits processor of this request failed: .*{message}"):
        engine.generate([1, 2], Sampling(processors=(PROCESSORS[message],)))
    while not engine.idle:
        engine.step()
    assert ids_of(neighbour) == expected and engine.metrics()["error"] == 1


def test_unknown_ids_are_refused(tiny) -> None:
    for settings in ({"logit_bias": {61: 1.0}}, {"bad_words": ((3, 61),)}):
        with pytest.raises(ValueError, match="id 61 cannot be biased, suppressed or forced; the ids are 0 to 60"):
            Engine(tiny()).submit([1], Sampling(**settings))


def random_settings(rng: random.Random) -> dict:
    options = {
        "logit_bias": {rng.randrange(61): rng.uniform(-5, 5) for _ in range(5)},
        "bad_words": tuple(tuple(rng.choices(range(61), k=rng.randint(1, 3))) for _ in range(40)),
        "stop_sequences": tuple(tuple(rng.choices(range(61), k=rng.randint(1, 2))) for _ in range(9)),
        "stop_ids": (rng.randrange(61),),
        "min_new": rng.randint(0, 12),
        "typical_p": rng.uniform(0.1, 1),
        "top_k": rng.randint(0, 30),
        "frequency_penalty": rng.uniform(-1, 1),
        "top_logprobs": rng.randint(0, 4),
        "prompt_logprobs": rng.randint(0, 3),
        "processors": (lambda tokens, logits: logits - logits.new_tensor(range(61)) * (len(tokens) % 3),),
    }
    chosen = rng.sample(list(options), k=rng.randint(0, len(options)))
    return {name: options[name] for name in chosen} | {
        "temperature": rng.choice([0, 0.7, 1.2]),
        "seed": rng.randrange(99),
    }


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_a_request_with_any_options_equals_the_request_alone(tiny, kind: str) -> None:
    rng, model = random.Random(4), tiny(kind)
    engine = Engine(model, rows=4, capacity=64, chunk=7, store=partial(Paged, block=4, blocks=20), queue=99)
    jobs = [
        (rng.choices(range(61), k=rng.randint(1, 25)), Sampling(max_new=rng.randint(12, 25), **random_settings(rng)))
        for _ in range(30)
    ]
    requests = [engine.submit(*job) for job in jobs]
    while not engine.idle:
        engine.step()
    assert engine.metrics()["preemptions"] > 0 and engine.metrics()["error"] == 0
    alone = Engine(model, rows=1, capacity=64, store="contiguous")
    for request in requests:
        expected = alone.submit(request.ids, request.sampling)
        while not alone.idle:
            alone.step()
        assert ids_of(request) == ids_of(expected)
        assert [token.logprob for token in request.prompt_logprobs] == pytest.approx(
            [token.logprob for token in expected.prompt_logprobs], abs=1e-9
        )


@pytest.mark.parametrize("chunk", [5, 64])
def test_prompt_logprobs_equal_those_of_the_whole_forward(tiny, chunk: int) -> None:
    model, rng = tiny("hybrid"), random.Random(5)
    engine = Engine(model, rows=3, capacity=60, chunk=chunk, store=partial(Paged, block=4, blocks=20))
    prompts = [rng.choices(range(61), k=length) for length in (30, 1, 2, 5, 6, 29, 31)]
    settings = [Sampling(max_new=25, temperature=0, prompt_logprobs=count) for count in (3, 0, 1, 0, 99, None, 2)]
    requests = [engine.submit(*job) for job in zip(prompts, settings, strict=True)]
    while not engine.idle:
        engine.step()
    assert engine.metrics()["preemptions"] > 0
    for request in requests:
        count = request.sampling.prompt_logprobs
        if count is None:
            assert request.prompt_logprobs == []
            continue
        with torch.inference_mode():
            logprobs = model(torch.tensor([request.ids]))[0, :-1].log_softmax(-1)
        assert [token.id for token in request.prompt_logprobs] == list(request.ids[1:])
        for row, token in zip(logprobs, request.prompt_logprobs, strict=True):
            assert token.logprob == pytest.approx(row[token.id].item(), abs=1e-9)
            best = row.topk(min(count, 61))
            assert [id for id, _ in token.top_logprobs] == best.indices.tolist()
            assert [value for _, value in token.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-9)


def test_the_head_runs_over_few_positions_at_a_time(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sizes = tiny(), []
    monkeypatch.setattr("regard.engine.prompt_logprobs.CHUNK", 8)
    hook = model.head.register_forward_hook(lambda module, inputs, output: sizes.append(len(output)))
    Engine(model).generate([1] * 21, Sampling(max_new=1, prompt_logprobs=0))
    hook.remove()
    assert sizes == [8, 8, 4, 1] and CHUNK > 8
