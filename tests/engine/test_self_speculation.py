"""Drafters that read the model's own states: blocks `ahead`, first layers, and the stream that they are given."""

from dataclasses import replace

import pytest
import torch

from regard.engine.engine import Engine
from regard.engine.request import Request, Sampling
from regard.engine.speculation.ahead_blocks import AheadBlocks
from regard.engine.speculation.draft_length import DraftCosts
from regard.engine.speculation.first_layers import FirstLayers, first_layers
from regard.engine.speculation.stream_rows import RequestStream, StreamRows, Streams
from regard.engine.stores import STORES
from regard.layout import TokenLayout
from regard.models.decoder import DecoderModule
from regard.parts.ssm.mamba import Mamba
from tests.engine.drafters import METHODS
from tests.laws import MODELS, block, build

GREEDY = Sampling(max_new=20, temperature=0)
PROMPTS = ([1, 2, 3], [4] * 40, [5], [7, 8])


@pytest.fixture(autouse=True)
def free_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are always as long as possible, however many are rejected."""
    monkeypatch.setattr("regard.engine.speculation.speculation.COSTS", {"cpu": DraftCosts(1.0, 0.0)})


@pytest.fixture(scope="module")
def model() -> DecoderModule:
    spec = MODELS["grouped-query"]
    return build(replace(spec, ahead=spec.layers[0].blocks * 2))


def run(engine: Engine, sampling: Sampling = GREEDY) -> list[Request]:
    requests = [engine.submit(ids, sampling) for ids in PROMPTS]
    while not engine.idle:
        engine.step()
    return requests


@pytest.mark.parametrize("store", STORES)
def test_blocks_ahead_change_no_token(model: DecoderModule, store: str) -> None:
    plain = [request.tokens for request in run(Engine(model, rows=3, capacity=64))]
    engine = Engine(model, rows=3, capacity=64, store=store, chunk=16, speculation=AheadBlocks())
    assert [request.tokens for request in run(engine)] == plain
    assert engine.metrics()["accepted_draft_tokens"] > 0 and "draft_acceptance_3" not in engine.metrics()


@pytest.mark.parametrize("method", ["ahead", "medusa", "eagle", "first layers"])
def test_drafts_are_those_of_a_forward_without_a_cache(model: DecoderModule, method: str, monkeypatch) -> None:
    """Every draft, also after rejections, in a batch and of a long prompt, against one forward over all tokens."""
    drafter, checked = AheadBlocks() if method == "ahead" else METHODS[method](model), 0
    engine = Engine(model, rows=3, capacity=64, chunk=16, prefix_cache=False, speculation=drafter, draft_tokens=3)
    propose = drafter.propose

    def check(requests, lengths):
        nonlocal checked
        drafts = propose(requests, lengths)
        for request, length, draft in zip(requests, lengths, drafts, strict=True):
            assert draft.ids == expected_draft(model, drafter, method, request.tokens, length)
            checked += 1
        return drafts

    monkeypatch.setattr(drafter, "propose", check)
    run(engine)
    assert checked > 40


def expected_draft(model: DecoderModule, drafter, method: str, tokens: list[int], length: int) -> list[int]:
    if method == "first layers":
        return greedy(first_layers(model, 1), tokens, length)
    if len(tokens) < 2:
        return []
    inputs = torch.tensor([tokens[:-1]])
    layout = TokenLayout.whole(1, len(tokens) - 1)
    x = model.residual_stream(inputs, layout)[0]
    if method == "ahead":
        outputs = [model.logits(model.final_norm(block(x, layout)[0]))[0, -1] for block in model.ahead]
        return [int(logits.argmax()) for logits in outputs[:length]]
    hidden = model.final_norm(x)
    if method == "medusa":
        return [int(logits.materialize()[0, -1].argmax()) for logits in drafter.heads(hidden, model)[:length]]
    ids = list(tokens)
    for _ in range(length):
        out = drafter.layer(hidden, model.embed(torch.tensor([ids[1:]])), TokenLayout.whole(1, hidden.shape[1]))
        hidden = torch.cat([hidden, out[:, -1:]], 1)
        ids.append(int(model.logits(out[0, -1]).argmax()))
    return ids[len(tokens) :]


def greedy(model: DecoderModule, tokens: list[int], count: int) -> list[int]:
    ids = list(tokens)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(tokens) :]


def test_a_stream_keeps_what_is_computed_last() -> None:
    x = torch.arange(12.0).unsqueeze(-1)
    stream = RequestStream()
    stream.add(0, x[:4])
    stream.add(4, x[4:7])
    stream.add(5, -x[5:8])  # the tokens from 5 on were rejected
    assert stream.read(3, 8).flatten().tolist() == [3, 4, -5, -6, -7]
    stream.drop(4)
    assert (stream.start, stream.end) == (4, 8) and stream.read(4, 6).flatten().tolist() == [4, -5]
    stream.add(2, x[2:4])  # a request that has lost its row computes its prompt again
    assert (stream.start, stream.end) == (2, 4)
    stream.add(6, x[6:7])  # a gap: the tokens between were reused
    assert (stream.start, stream.end) == (6, 7)
    stream.cut(6)
    assert stream.end == 6


def test_reused_prefixes_shorten_what_a_drafter_reads(model: DecoderModule) -> None:
    prompt, drafter = list(range(1, 20)) * 2, METHODS["eagle"](model)
    plain = Engine(model, rows=1, capacity=64).generate(prompt, GREEDY)
    engine = Engine(model, rows=1, capacity=64, speculation=drafter)
    for reused in (0, 32):
        request = engine.submit(prompt, GREEDY)
        while not engine.idle:
            engine.step()
        assert request.reused == reused and [t.id for t in request.new] == [t.id for t in plain]


def test_self_speculation_that_does_not_fit_is_refused(model: DecoderModule) -> None:
    with pytest.raises(ValueError, match="the model has no blocks `ahead`"):
        Engine(build(MODELS["grouped-query"]), rows=1, speculation=AheadBlocks())
    for layers in (0, 2):
        with pytest.raises(ValueError, match=f"self:{layers}: the model has 2 layer.* choose from 1 to 1"):
            Engine(model, rows=1, speculation=FirstLayers(layers))
    memory = (block(Mamba(4)).memory(24),)
    with pytest.raises(ValueError, match="recurrent states, from which a rejected draft cannot be dropped"):
        StreamRows(Streams(), memory, 1, 8, torch.zeros(1))
