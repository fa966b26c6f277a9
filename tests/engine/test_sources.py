"""Encoder-decoders in the engine: the tokens of a request depend only on its source and prompt."""

import random
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from regard.engine.engine import Engine
from regard.engine.request import Request, Sampling, TokenHistory
from regard.engine.sampling import sample
from regard.engine.stores import STORES
from regard.engine.stores.paged import Paged
from regard.layout import TokenLayout
from regard.models.presets import transformer_2017
from regard.models.seq2seq import seq2seq
from tests.engine.pools import small_store
from tests.laws import randomize_weights

VOCAB, SOURCE_VOCAB = 61, 43
MODELS = {
    "transformer": transformer_2017(vocab=VOCAB, width=32, heads=4, hidden=40, layers=2),
    "lstm": seq2seq(VOCAB, 24, layers=2, source_vocab=SOURCE_VOCAB),
    "additive attention": seq2seq(VOCAB, 24, attention="additive", layers=2, source_vocab=SOURCE_VOCAB),
    "general attention": seq2seq(VOCAB, 24, attention="general", source_vocab=SOURCE_VOCAB),
}
SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.0, "forced_bos_id": 7, "forced_eos_id": 9, "suppress_ids": (3, 20, 41)},
    {"temperature": 1.2, "seed": 6, "top_k": 9, "suppress_ids": (3,)},
]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    model = MODELS[request.param].build(seed=0).double().eval().requires_grad_(False)
    randomize_weights(model, seed=1)
    return model


def make_jobs(count: int) -> list[tuple[list[int], Sampling, list[int]]]:
    rng = random.Random(2)
    jobs = []
    for i in range(count):
        prompt, source = (rng.choices(range(SOURCE_VOCAB), k=rng.choice(sizes)) for sizes in ((1, 1, 9), (1, 4, 9, 17)))
        jobs.append((prompt, Sampling(max_new=rng.randint(1, 14), **SETTINGS[i % len(SETTINGS)]), source))
    return jobs


def whole_logits(model: nn.Module, request: Request) -> Tensor:
    """The logits (new, V) of one forward without a cache."""
    return model(torch.tensor([request.source]), torch.tensor([request.tokens[:-1]]))[0, len(request.ids) - 1 :]


@pytest.mark.parametrize("store", ["contiguous", "paged"])
@pytest.mark.parametrize("chunk", [256, 3])
def test_batched_requests_equal_the_model_without_a_cache(model: nn.Module, store: str, chunk: int) -> None:
    engine = Engine(model, rows=4, capacity=24, source_capacity=32, store=small_store(store, 8), chunk=chunk)
    rng, jobs, requests = random.Random(3), make_jobs(15), []
    while jobs or not engine.idle:
        for _ in range(min(len(jobs), rng.choice([0, 1, 3]))):
            requests.append(engine.submit(*jobs.pop(0)))
        engine.step()
    assert engine.metrics()["error"] == 0
    assert (engine.metrics()["preemptions"] > 0) == (store == "paged")
    for request in requests:
        reference = Request(request.ids, request.sampling)
        if reference.sampling.penalizes:
            reference.history = TokenHistory(reference.ids, VOCAB, torch.device("cpu"))
        for row, token in zip(whole_logits(model, request), request.new, strict=True):
            (expected,) = sample(row.unsqueeze(0), [reference]).read()
            assert token.id == expected.id and abs(token.logprob - expected.logprob) < 1e-9
            reference.add(expected)


def test_a_source_is_encoded_once(model: nn.Module) -> None:
    shapes = []
    hook = model.source.stack.register_forward_hook(lambda _, inputs, __: shapes.append(tuple(inputs[0].shape[:2])))
    engine = Engine(model, rows=4, capacity=40)
    first = engine.submit([1], Sampling(max_new=9, temperature=0), [1, 2, 3])
    engine.step()
    engine.submit([1], Sampling(max_new=3, temperature=0), [4] * 7)
    while not engine.idle:
        engine.step()
    hook.remove()
    assert shapes == [(1, 3), (1, 7)] and len(first.new) == 9


def test_invalid_sources_are_refused(tiny) -> None:
    engine = Engine(MODELS["lstm"].build(seed=0), capacity=16, source_capacity=8)
    greedy = Sampling(temperature=0)
    for source, message in [
        (None, "an encoder-decoder needs the ids of a source"),
        ([], "the source is empty; at least one token is needed"),
        (5, "the source is 5, not a sequence of token ids; give a list of integers"),
        ([1] * 9, "the source has 9 tokens, but at most 8 fit; shorten it"),
        ([SOURCE_VOCAB], "the source has id 43; the model's ids are 0 to 42"),
    ]:
        with pytest.raises(ValueError, match=message):
            engine.submit([1], greedy, source)
    with pytest.raises(ValueError, match="a decoder reads no source"):
        Engine(tiny()).submit([1], greedy, [1])
    with pytest.raises(ValueError, match=r"have shape \(3, 32\); this prompt needs a tensor of shape \(2, 32\)"):
        Engine(tiny()).submit([1, 2], greedy, embeddings=torch.zeros(3, 32))
    for wrong in ({"suppress_ids": (1, 61)}, {"forced_bos_id": 61}, {"forced_eos_id": 61}):
        with pytest.raises(ValueError, match="id 61 cannot be biased, suppressed or forced; the ids are 0 to 60"):
            Engine(tiny()).submit([1], Sampling(**wrong))
    with pytest.raises(ValueError, match="source_capacity=0 must be a positive integer"):
        Engine(MODELS["lstm"].build(seed=0), source_capacity=0)
    with pytest.raises(ValueError, match="source_capacity=-5 must be a positive integer"):
        Engine(tiny(), source_capacity=-5)


def test_embeddings_replace_those_of_the_prompt(tiny) -> None:
    """They do so beside a request without embeddings, in chunks, and after preemption."""
    model, rng = tiny(), random.Random(1)
    prompts = [rng.choices(range(VOCAB), k=size) for size in (9, 1, 14, 6, 11)]
    engine = Engine(model, rows=3, capacity=40, chunk=5, store=partial(Paged, block=4, blocks=10))
    requests = []
    for i, ids in enumerate(prompts):
        embeddings = None if i == 3 else torch.randn(len(ids), 32, generator=torch.Generator().manual_seed(i)).double()
        requests.append(engine.submit(ids, Sampling(max_new=12, temperature=0), embeddings=embeddings))
    while not engine.idle:
        engine.step()
    assert engine.metrics()["preemptions"] > 0
    for request in requests:
        tokens = torch.tensor([request.tokens[:-1]])
        with torch.inference_mode():
            x = model.embed(tokens)
            if request.embeddings is not None:
                x[0, : len(request.ids)] = request.embeddings
            logits = model(tokens, embeddings=x)[0, len(request.ids) - 1 :]
        assert [token.id for token in request.new] == logits.argmax(-1).tolist()


@torch.inference_mode()
@pytest.mark.parametrize("kind", STORES)
def test_a_row_without_a_source_stays_empty(kind: str) -> None:
    """Its first tokens are refused without a source, and with one that is too long."""
    model = MODELS["transformer"].build(seed=0).double().eval()
    tokens, source = (torch.randint(VOCAB, (2, size), generator=torch.Generator().manual_seed(size)) for size in (8, 5))
    store = STORES[kind](model.spec.memory(), 2, 16, torch.float64, source=6)
    assert store.reserve(0, 8) and store.reserve(1, 8)

    def run_chunk(source: Tensor | None, start: int, stop: int) -> Tensor:
        layout = TokenLayout(torch.arange(start, stop).expand(2, -1))
        return model(source, tokens[:, start:stop], layout=layout, states=store.begin_forward(layout))

    no_source = r"rows \[0, 1\] start here, but they have no source"
    for refused, message in [(None, no_source), (tokens, "the source has 8 tokens, but the store holds 6")]:
        with pytest.raises(ValueError, match=message):
            run_chunk(refused, 0, 4)
        assert not store.table.lengths.any()
    found = torch.cat([run_chunk(source, 0, 4), run_chunk(None, 4, 8)], 1)
    assert (found - model(source, tokens)).abs().max() < 1e-12
