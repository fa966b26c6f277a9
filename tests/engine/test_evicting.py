"""Caches of the keys that queries attend to most (H2O, SnapKV): equal to loops over all keys, in any chunks."""

import pytest
import torch
from torch import Tensor

from regard.engine.caches import RULES, parse_cache
from regard.engine.engine import Engine
from regard.engine.memory import bytes_of
from regard.engine.request import Sampling
from regard.engine.stores import STORES
from regard.engine.stores.base import CannotRewind, Store
from regard.engine.stores.evicting import STEP, EvictingStorage
from regard.engine.stores.eviction_rules import HeavyHitters
from regard.kernels.attention.patterns.window import Window
from regard.layout import TokenLayout
from regard.models.decoder import Decoder, DecoderModule
from regard.parts.attention import Attention, use_backend
from regard.parts.latent_attention import LatentAttention
from regard.parts.linear_attention import LinearAttention
from regard.parts.position.alibi import Alibi
from regard.parts.position.learned import Learned
from regard.parts.position.rope import Rope
from regard.parts.position.t5 import T5Buckets
from regard.verification.laws.eviction import attend_to_kept
from tests.laws import block, build, decoder, error, random_ids

LENGTH, PROMPT = 30, 19
ROPE = decoder(block(Attention(4, 2, position=Rope())))
SPECS = {
    "rope": ROPE,
    "sinks, softcap": decoder(block(Attention(4, 1, position=Rope(), sinks=True, softcap=3.0))),
    "learned": decoder(block(Attention(3)), position=Learned(64)),
}
GREEDY = Sampling(max_new=14, temperature=0)


def open_store(spec: Decoder, cache: str, rows: int = 1, kind: str = "contiguous") -> Store:
    store = STORES[kind](parse_cache(cache).declare(spec.memory()), rows, 64, torch.float64)
    for row in range(rows):
        store.admit(row, range(LENGTH), prompt=PROMPT)
    return store


@torch.inference_mode()
def run(model: DecoderModule, store: Store, tokens: Tensor, cuts: list[int], row: int = 0) -> Tensor:
    logits, rows = [], torch.arange(row, row + len(tokens))
    for start, stop in zip(cuts, cuts[1:], strict=False):
        layout = TokenLayout(torch.arange(start, stop).expand(len(tokens), -1), rows=rows)
        logits.append(model(tokens[:, start:stop], layout, store.begin_forward(layout)))
    return torch.cat(logits, 1)


@pytest.mark.ledger("kv.evict")
@torch.inference_mode()
@pytest.mark.parametrize(("name", "cache"), [
    *(("rope", cache) for cache in ("h2o:4", "h2o:7", "h2o:12", "snapkv:4", "snapkv:9", "h2o:40", "snapkv:40")),
    *(("rope", cache) for cache in ("h2o:999999999999", "snapkv:999999999999")),
    ("sinks, softcap", "h2o:7"), ("sinks, softcap", "snapkv:9"), ("learned", "h2o:7"),
])  # fmt: skip
def test_evicting_equals_loops_over_the_kept_keys(name: str, cache: str) -> None:
    model, tokens = build(SPECS[name]), random_ids(2, LENGTH)
    kind, budget = cache.split(":")
    full = model(tokens)
    with attend_to_kept(model, RULES[kind](int(budget)), PROMPT):
        expected = model(tokens)
    for store, size in (("contiguous", 1), ("contiguous", 5), ("contiguous", LENGTH), ("paged", PROMPT)):
        logits = run(model, open_store(SPECS[name], cache, 2, store), tokens, [*range(0, LENGTH, size), LENGTH])
        assert error(logits, expected) < 1e-12, (store, size)
    if int(budget) > LENGTH:
        assert error(expected, full) < 1e-12
    else:
        assert error(expected, full) > 1e-3, "the eviction changes the output"


@torch.inference_mode()
@pytest.mark.parametrize("cache", ["h2o:8", "snapkv:8"])
def test_padded_chunks_and_rows_of_different_lengths(cache: str) -> None:
    model, tokens = build(ROPE), random_ids(2, LENGTH)
    alone = [run(model, open_store(ROPE, cache), tokens[b : b + 1], [0, LENGTH])[0] for b in (0, 1)]
    store, done = open_store(ROPE, cache, 3), [0, 0]
    for left, sizes in ((False, (9, 3)), (True, (1, 8)), (False, (1, 1)), (True, (10, 2)), (False, (3, 12))):
        width = max(sizes)
        indices, counts = torch.arange(width), torch.tensor(sizes).unsqueeze(1)
        valid = indices >= width - counts if left else indices < counts
        offsets = (indices - (width - counts) if left else indices.expand(2, -1)).where(valid, 0)
        layout = TokenLayout(torch.tensor(done).unsqueeze(1) + offsets, valid=valid, rows=torch.tensor([2, 0]))
        logits = model(tokens.gather(1, layout.positions), layout, store.begin_forward(layout))
        for b, size in enumerate(sizes):
            assert error(logits[b][valid[b]], alone[b][done[b] : done[b] + size]) < 1e-12
            done[b] += size


@pytest.mark.parametrize("cache", ["h2o:8", "snapkv:8"])
def test_rewind_fork_and_reuse_of_a_row(cache: str) -> None:
    model, tokens = build(ROPE), random_ids(1, LENGTH)
    expected = run(model, open_store(ROPE, cache), tokens, [0, LENGTH])
    store = open_store(ROPE, cache, 2)
    store.release(1)
    run(model, store, tokens, [0, 10])
    snapshot = store.snapshot(0)
    run(model, store, random_ids(1, LENGTH, seed=3), [10, 22])
    with pytest.raises(CannotRewind, match="evicted tokens because of the attention weights of later queries"):
        store.rewind(0, 21)
    store.rewind(0, 10, snapshot)
    assert store.fork(0, 1, snapshot)
    for row in (0, 1):
        assert error(run(model, store, tokens, [10, 17, LENGTH], row), expected[:, 10:]) < 1e-12
    for storage in store.storages:
        for array in storage.arrays.values():
            array[0] = torch.nan  # as after a failed forward
    store.release(0)
    store.admit(0, range(LENGTH), prompt=PROMPT)
    assert error(run(model, store, tokens, [0, 7, LENGTH]), expected) < 1e-12


@pytest.mark.ledger("kv.evict")
@pytest.mark.parametrize("cache", ["h2o:8", "snapkv:8"])
def test_an_engine_with_many_requests_equals_each_alone(cache: str) -> None:
    model = build(ROPE)
    prompts = [random_ids(n, seed=n).tolist() for n in (3, 25, 9, 14)]
    alone = [Engine(model, rows=1, capacity=48, cache=cache).generate(ids, GREEDY) for ids in prompts]
    engine = Engine(model, rows=3, capacity=48, cache=cache, chunk=7)
    requests, kept = [engine.submit(ids, GREEDY) for ids in prompts], []
    while not engine.idle:
        engine.step()
        for request in engine.scheduler.running:
            storage = next(s for s in engine.store.storages if isinstance(s, EvictingStorage))
            held = (storage.positions[request.row] >= 0).sum(-1)  # (K,)
            kept.append(held.unique().tolist() == [engine.cache.kept(request.cached, len(request.ids))])
    assert kept and all(kept), "each head keeps as many tokens as the cache reports"
    assert [[t.id for t in request.new] for request in requests] == [[t.id for t in new] for new in alone]
    engine.submit(prompts[1], GREEDY)
    while engine.scheduler.waiting or engine.scheduler.running[0].cached < 30:
        engine.step()
    numbers = engine.metrics()
    assert numbers["cached_tokens"] + numbers["evicted_tokens"] == 30 and numbers["evicted_tokens"] > 0


@pytest.mark.ledger("kv.evict")
def test_the_budget_bounds_the_memory() -> None:
    for length in range(200):
        assert HeavyHitters(32).kept(length, 0) <= 32
    stores = [open_store(ROPE, f"h2o:{budget}") for budget in (8, 16)]
    assert 2 * bytes_of(stores[0]) == bytes_of(stores[1])
    whole, more = (bytes_of(open_store(ROPE, f"h2o:{budget}")) for budget in (64, 10**6))
    assert more == whole, "a row has at most its capacity of 64 tokens"


def test_slots_of_a_prompt_are_freed_once_it_is_compressed() -> None:
    model, sizes = build(ROPE), []
    engine = Engine(model, rows=1, capacity=8 * STEP, cache="snapkv:8")
    request = engine.submit(random_ids(5 * STEP).tolist(), GREEDY)
    while request.finish is None:
        engine.step()
        sizes.append(engine.metrics()["cache_bytes"])
    assert sizes[-1] * 4 == max(sizes)


@pytest.mark.parametrize(("spec", "cache", "message"), [
    (ROPE, "h2o:3", "3 tokens are too few; choose at least 4"),
    (ROPE, "h2o", "is not of the form h2o:512"),
    (ROPE, "snapkv:4+4", "is not of the form snapkv:512"),
    (decoder(block(Attention(4, position=Alibi()))), "h2o:8", "cannot choose keys by their scores"),
    (decoder(block(Attention(4)), position=T5Buckets(8, 12, heads=4)), "h2o:8", "cannot choose keys by their scores"),
    (decoder(block(LatentAttention(3, 8, 6, 4, position=Rope()))), "snapkv:8", "the arrays latent, k_rope cannot"),
    (decoder(block(Attention(4, mask=Window(12)))), "h2o:8", "it needs attention with keys and values per head, the c"),
    (decoder(block(LinearAttention(4))), "h2o:8", "no layer of this model keeps keys and values"),
])  # fmt: skip
def test_what_cannot_evict_is_refused(spec: Decoder, cache: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Engine(build(spec), cache=cache)
    assert message in str(caught.value)


def test_options_that_exclude_the_cache() -> None:
    model = build(ROPE)
    with pytest.raises(ValueError, match="compile does not support cache='h2o:8'"):
        Engine(model, cache="h2o:8", compile=True)
    use_backend(model, "sdpa")
    with pytest.raises(ValueError, match="sdpa does not return the scores by which a store chooses keys"):
        run(model, open_store(ROPE, "h2o:8"), random_ids(1, LENGTH), [0, LENGTH])


def test_layers_with_a_short_window_stay_as_they_are() -> None:
    spec = decoder(block(Attention(4, 2, position=Rope(), mask=Window(4))), block(Attention(4, 2, position=Rope())))
    kinds = {type(storage).__name__ for storage in open_store(spec, "h2o:8").storages}
    assert kinds == {"RingStorage", "EvictingStorage"}
