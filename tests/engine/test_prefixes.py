"""Requests that start with the same tokens share them: the same output as without sharing, for every kind of state."""

import copy
from functools import partial

import pytest
import torch

from regard.engine.engine import Engine
from regard.engine.request import Sampling
from regard.engine.stores.paged import Paged
from regard.kernels.attention.patterns.window import SinksAndWindow, Window
from regard.parts.attention import Attention
from regard.parts.latent_attention import LatentAttention
from regard.parts.linear_attention import LinearAttention
from regard.parts.position.rope import Rope
from regard.parts.ssm.mamba import Mamba
from regard.parts.ssm.mamba2 import Mamba2
from tests.laws import block, build, decoder, random_ids

BLOCK = 4
MIXERS = {
    "gqa": [Attention(4, 2, position=Rope())],
    "mla": [LatentAttention(3, 8, 6, 4, position=Rope())],
    "window": [Attention(4, 2, position=Rope(), mask=Window(5))],
    "window and full": [Attention(4, 2, mask=SinksAndWindow(2, 4)), Attention(4, 2, position=Rope())],
    "mamba": [Mamba(4)],
    "mamba2 and full": [Mamba2(4, 8), Attention(4, 2, position=Rope())],
    "linear, window, full": [LinearAttention(4), Attention(4, 2, mask=Window(6)), Attention(4, 2)],
}
GREEDY = Sampling(max_new=7, temperature=0)


@pytest.fixture(scope="module")
def models():
    return {name: build(decoder(*(block(mixer) for mixer in mixers))) for name, mixers in MIXERS.items()}


def open_engine(model, rows: int = 3, blocks: int = 40, chunk: int = 8, **options) -> Engine:
    return Engine(
        model, rows=rows, capacity=60, store=partial(Paged, block=BLOCK, blocks=blocks), chunk=chunk, **options
    )


def prompt(length: int, seed: int = 0) -> list[int]:
    return random_ids(length, seed=seed).tolist()


def generate(engine: Engine, ids: list[int], **options) -> list[tuple[int, float]]:
    request = engine.submit(ids, GREEDY, **options)
    while request.finish is None:
        engine.step()
    assert request.finish == "length"
    return [(token.id, round(token.logprob, 9)) for token in request.new]


def hits(engine: Engine) -> int:
    return engine.metrics()["prefix_hit_tokens"]


@pytest.mark.ledger("kv.prefix")
@pytest.mark.parametrize("name", MIXERS)
def test_a_prefix_hit_equals_a_miss(models, name: str) -> None:
    """The whole prompt again, a longer one, a continued conversation, and prompts that differ after a common prefix."""
    engine, plain = open_engine(models[name]), open_engine(models[name], prefix_cache=False)
    first = prompt(22)
    answer = [id for id, _ in generate(plain, first)]
    copied = bool(engine.store.table.overwriting)  # then prefixes end where the states were copied: at 8, 16 and 20
    prompts = {
        "first": (first, 0),
        "again": (first, 20),
        "longer": (first + prompt(9, 1), 20),
        "conversation": (first + answer + prompt(5, 2), 20 if copied else 28),
        "common prefix": (first[:17] + prompt(8, 3), 16),
        "other": (prompt(22, 4), 0),
        "shorter": (first[:16], 8 if copied else 12),  # the last token is always computed
    }
    for kind, (ids, expected) in prompts.items():
        before = hits(engine)
        assert generate(engine, ids) == generate(plain, ids), kind
        assert hits(engine) - before == expected, kind
    assert hits(plain) == 0


@pytest.mark.parametrize("name", ["gqa", "linear, window, full"])
def test_running_requests_share_their_prefix(models, name: str) -> None:
    model = models[name]
    engine, ids = open_engine(model), prompt(24)
    first = engine.submit(ids, GREEDY)
    while not first.new:
        engine.step()
    others = [engine.submit(ids[:20] + prompt(4, seed), GREEDY) for seed in (1, 2)]
    engine.step()
    assert [request.cached >= 20 for request in others] == [True, True]
    if name == "gqa":
        assert engine.store.owned[first.row][:5] == engine.store.owned[others[0].row][:5]
    while not engine.idle:
        engine.step()
    plain = open_engine(model, prefix_cache=False)
    for request in (first, *others):
        assert [token.id for token in request.new] == [id for id, _ in generate(plain, list(request.ids))]


def test_salts_never_share(models) -> None:
    engine, ids = open_engine(models["gqa"]), prompt(20)
    expected = generate(engine, ids, salt="a")
    for salt in ("b", "", "a "):
        assert generate(engine, ids, salt=salt) == expected and hits(engine) == 0
    assert generate(engine, ids, salt="a") == expected and hits(engine) == 16


@pytest.mark.parametrize("name", ["gqa", "linear, window, full"])
def test_embeddings_are_shared_only_if_every_bit_is_equal(models, name: str) -> None:
    """A prompt of text, eight tokens with embeddings of their own, as of an image, and text again."""
    model, ids, image = models[name], prompt(22), slice(8, 16)
    engine, plain = open_engine(model), open_engine(model, prefix_cache=False)
    with torch.no_grad():
        text = model.embed(torch.tensor([ids]))[0]
        first, other = text.clone(), text.clone()
        first[image] = torch.randn(8, model.spec.width, dtype=torch.float64)
        other[image] = first[image]
        other[12, 3] *= 1 + 2e-16  # the next number
    assert (first != other).sum() == 1
    cases = [
        (first, 0), (first, 20), (other, 12), (other, 20), (None, 8), (text, 20), (first.clone(), 20),
        (torch.cat([first[:20], text[:2]]), 20),
    ]  # fmt: skip
    if engine.store.table.overwriting:  # prefixes end where the states were copied: at 8, 16 and 20
        cases[2] = (other, 8)
    for i, (given, expected) in enumerate(cases):
        before = hits(engine)
        assert generate(engine, ids, embeddings=given) == generate(plain, ids, embeddings=given), i
        assert hits(engine) - before == expected, i
    assert hits(plain) == 0


def test_a_conversation_after_an_image_reuses_the_image_and_the_answer(models) -> None:
    model, ids = models["gqa"], prompt(20)
    engine = open_engine(model)
    embeddings = model.embed(torch.tensor([ids]))[0].detach().clone()
    embeddings[4:12] += 1
    answer = [id for id, _ in generate(engine, ids, embeddings=embeddings)]
    longer = [*ids, *answer, *prompt(5, 2)]
    more = model.embed(torch.tensor([longer]))[0].detach().clone()
    more[:20] = embeddings
    expected = generate(open_engine(model, prefix_cache=False), longer, embeddings=more)
    before = hits(engine)
    assert generate(engine, longer, embeddings=more) == expected
    assert hits(engine) - before == 24  # the last new token was never computed


def test_equal_prompts_with_different_images_do_not_wait_for_each_other(models) -> None:
    engine, ids = open_engine(models["gqa"]), prompt(20)
    images = [torch.full((20, models["gqa"].spec.width), float(i), dtype=torch.float64) for i in (1, 1, 2)]
    requests = [engine.submit(ids, GREEDY, embeddings=image) for image in images]
    assert [request.leader for request in requests] == [None, requests[0], None]
    while not engine.idle:
        engine.step()
    found = [[token.id for token in request.new] for request in requests]
    assert found[0] == found[1]
    plain = open_engine(models["gqa"], prefix_cache=False)
    for image, tokens in zip(images, found, strict=True):
        assert tokens == [id for id, _ in generate(plain, ids, embeddings=image)]


def test_log_probabilities_of_a_prompt_are_computed_in_full(models) -> None:
    engine, ids = open_engine(models["gqa"]), prompt(20)
    found = []
    for _ in range(2):
        generate(engine, ids)
        request = engine.submit(ids, Sampling(max_new=1, temperature=0, prompt_logprobs=0))
        while request.finish is None:
            engine.step()
        found.append([token.logprob for token in request.prompt_logprobs])
    assert found[0] == found[1] and len(found[0]) == 19 and hits(engine) == 16  # of the other request


def test_a_changed_model_does_not_reuse_old_prefixes(models) -> None:
    model, ids = copy.deepcopy(models["gqa"]), prompt(20)
    engine, plain = open_engine(model), open_engine(model, prefix_cache=False)
    generate(engine, ids)
    attention = model.stack.blocks[0].sublayers[0].body
    handle = attention.v_proj.register_forward_hook(lambda module, inputs, output: 2 * output)
    assert generate(engine, ids) == generate(plain, ids) and hits(engine) == 0
    handle.remove()
    assert generate(engine, ids) == generate(plain, ids) and hits(engine) == 16  # the prefix without the hook
    with torch.no_grad():
        attention.v_proj.weight.mul_(2)
    assert generate(engine, ids) == generate(plain, ids) and hits(engine) == 16
    attention.v_proj = copy.deepcopy(model.stack.blocks[1].sublayers[0].body.v_proj)
    assert generate(engine, ids) == generate(plain, ids) and hits(engine) == 16
    engine.reset_prefix_cache()
    assert engine.metrics()["cached_blocks"] == 0


@pytest.mark.parametrize("name", MIXERS)
def test_a_preempted_request_finds_its_own_prefix(models, name: str) -> None:
    engine = open_engine(models[name])
    request = engine.submit(prompt(22), GREEDY)
    while len(request.new) < 2:
        engine.step()
    engine.scheduler.preempt(request)
    assert request.cached == 0
    engine.step()
    assert request.cached >= 20
    while not engine.idle:
        engine.step()
    assert [token.id for token in request.new] == [
        id for id, _ in generate(open_engine(models[name], prefix_cache=False), prompt(22))
    ]


def test_the_least_recently_used_prefix_is_evicted(models) -> None:
    engine, plain = open_engine(models["gqa"], rows=1, blocks=18), open_engine(models["gqa"], prefix_cache=False)
    prompts = [prompt(16, seed) for seed in range(3)]  # five full blocks each, with the answer
    for ids in prompts:
        generate(engine, ids)
    metrics = engine.metrics()
    assert (metrics["cached_blocks"], metrics["evicted_blocks"], metrics["free_blocks"]) == (15, 0, 18)
    generate(engine, prompts[0])  # used again, so the second is the oldest
    generate(engine, prompt(20, 9))
    assert 0 < engine.metrics()["evicted_blocks"] <= 5
    for ids, found in ((prompts[0], 12), (prompts[2], 12), (prompts[1], 0)):
        before = hits(engine)
        assert generate(engine, ids) == generate(plain, ids)
        assert hits(engine) - before == found


def test_few_states_are_kept(models) -> None:
    model = models["mamba"]
    store = partial(Paged, block=BLOCK, blocks=60, states=3)
    engine = Engine(model, rows=1, capacity=60, store=store, chunk=100)
    prompts = [prompt(18, seed) for seed in range(5)]
    for ids in prompts:
        generate(engine, ids)
    assert engine.metrics()["cached_states"] == 3
    for ids, found in [*((ids, 16) for ids in prompts[2:]), (prompts[0], 0)]:
        before = hits(engine)
        generate(engine, ids)
        assert hits(engine) - before == found


def test_a_failed_forward_leaves_nothing_to_reuse(models) -> None:
    """The second layer fails after the first has written its keys."""
    model, ids = copy.deepcopy(models["gqa"]), prompt(20)
    engine = open_engine(model, rows=1, chunk=100)
    expected = generate(open_engine(model), ids)
    broken = model.stack.blocks[-1].forward

    def fail(*args, **kwargs):
        model.stack.blocks[-1].forward = broken
        raise RuntimeError("broken once")

    model.stack.blocks[-1].forward = fail
    request = engine.submit(ids, GREEDY)
    engine.step()
    assert request.finish == "error" and engine.metrics()["cached_blocks"] == 0
    assert generate(engine, ids) == expected and hits(engine) == 0


def test_a_prefix_with_nan_is_not_kept(models) -> None:
    """Its first chunk succeeds, but the logits after the second are not finite."""
    model, ids = copy.deepcopy(models["gqa"]), prompt(20)
    engine, expected = open_engine(model, rows=1, chunk=8), generate(open_engine(model), ids)
    embed, calls = model.embed, []

    def embed_nan_once(tokens):
        calls.append(tokens)
        return embed(tokens) * (torch.nan if len(calls) == 1 else 1)

    model.embed = embed_nan_once
    request = engine.submit(ids, GREEDY)
    while request.finish is None:
        engine.step()
    assert "not finite" in request.error and engine.metrics()["cached_blocks"] == 0
    assert generate(engine, ids) == expected and hits(engine) == 0


@pytest.mark.parametrize(("chunk", "starts"), [(100, [0, 20]), (8, [0, 8, 16, 20]), (10, [0, 8, 16, 20])])
def test_chunks_of_a_prompt_end_at_block_borders(models, chunk: int, starts: list[int]) -> None:
    engine, found = open_engine(models["mamba"], chunk=chunk), []
    request = engine.submit(prompt(23), GREEDY)
    while not request.new:
        found.append(request.cached)
        engine.step()
    assert found == starts
