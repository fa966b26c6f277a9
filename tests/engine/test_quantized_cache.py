"""Keys and values in few bits: within the bound of their format, the same in any chunks, in a fraction of the bytes."""

from functools import partial

import pytest
import torch
from torch import Tensor

from regard.engine.caches import FORMATS, QuantizedCache, parse_cache
from regard.engine.engine import Engine
from regard.engine.memory import bytes_of
from regard.engine.request import Sampling
from regard.engine.speculation.prompt_lookup import PromptLookup
from regard.engine.stores import STORES
from regard.engine.stores.arrays import PlainArrays, QuantizedArrays, QuantizedTokens
from regard.engine.stores.paged import Paged
from regard.kernels.attention.patterns.window import Window
from regard.layout import TokenLayout
from regard.models.decoder import Decoder
from regard.parts.attention import Attention, AttentionModule
from regard.parts.latent_attention import LatentAttention
from regard.parts.native_sparse_attention import NativeSparse
from regard.parts.position.alibi import Alibi
from regard.parts.position.rope import Rope
from regard.parts.split_heads import merge_heads, split_heads
from regard.parts.state import PerToken
from tests.laws import block, build, decoder, error, random_ids

LENGTH = 22
CACHES = ["int8", "fp8:0", "int4:0", "int8:3", "fp8:5", "int4:4", "int4:40", "int4:999999999999"]
MIXERS = {
    "rope": Attention(4, 2, position=Rope()),
    "alibi, window": Attention(4, 2, position=Alibi(), mask=Window(6)),
    "latent": LatentAttention(3, 8, 6, 4, position=Rope()),
}


def round_trip(x: Tensor, name: str) -> Tensor:
    """What a store returns for an array (B, heads, L, dim)."""
    encoding = QuantizedArrays(FORMATS[name], x.dtype)
    return encoding.decode("k", encoding.encode("k", x))


def open_store(kind: str, spec: Decoder, cache: str | None, rows: int = 1, slack: int = 1, dtype=torch.float64):
    memory = spec.memory() if cache is None else parse_cache(cache).declare(spec.memory())
    store = STORES[kind](memory, rows, 64, dtype, slack=slack, **({"block": 4} if kind == "paged" else {}))
    for row in range(rows):
        assert store.reserve(row, LENGTH)
    return store


def run(model, store, tokens: Tensor, cuts: list[int]) -> Tensor:
    logits = []
    for start, stop in zip(cuts, cuts[1:], strict=False):
        layout = TokenLayout(torch.arange(start, stop).expand(len(tokens), -1))
        logits.append(model(tokens[:, start:stop], layout, store.begin_forward(layout)))
    return torch.cat(logits, 1)


@pytest.mark.ledger("kv.quantised")
@pytest.mark.parametrize("name", FORMATS)
def test_each_element_is_within_the_bound_of_its_format(name: str) -> None:
    x = torch.randn(2, 3, 50, 16, dtype=torch.float64) * torch.logspace(-6, 3, 50, dtype=torch.float64).unsqueeze(-1)
    x[0, 0, 0] = 0.0
    stored = FORMATS[name].quantize(x)
    difference = (round_trip(x, name) - x).abs()
    assert (difference <= FORMATS[name].error_bound(stored) * (1 + 1e-6)).all()
    steps = {"int8": 254, "fp8": 16, "int4": 15}[name]
    spread = x.amax(-1).clamp_min(0) - x.amin(-1).clamp_max(0)  # the range that the levels cover
    assert (difference.amax(-1) <= 1.1 * 2 * spread / steps).all()


@pytest.mark.ledger("kv.quantised")
@pytest.mark.parametrize("name", FORMATS)
def test_outputs_of_attention_are_within_a_bound(name: str) -> None:
    """Scores change by at most δ = scale · |q|₁ max |Δk|, so weights by a factor of at most exp(2δ).

    |Δout| ≤ (exp(2δ) - 1) max |v| + max |Δv|
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 40, 16, generator=generator, dtype=torch.float64) for _ in range(3))
    q, scale = q / 8, 16**-0.5  # small queries: the bound is exponential in the scores

    def attend(k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2) * scale).softmax(-1) @ v

    k_bound, v_bound = (FORMATS[name].error_bound(FORMATS[name].quantize(x)).double().amax() for x in (k, v))
    change = scale * q.abs().sum(-1, keepdim=True) * k_bound
    bound = ((2 * change).exp() - 1) * v.abs().amax((-1, -2), keepdim=True) + v_bound
    found = (attend(round_trip(k, name), round_trip(v, name)) - attend(k, v)).abs()
    assert (found <= bound).all() and found.amax() > 0


def test_more_bits_are_closer_to_the_full_cache() -> None:
    spec = decoder(block(MIXERS["rope"]))
    model, tokens = build(spec), random_ids(2, LENGTH)
    with torch.inference_mode():
        full = model(tokens)
        distance = {
            cache: (run(model, open_store("paged", spec, cache, 2), tokens, [0, LENGTH]) - full).abs().mean().item()
            for cache in ("int8", "fp8", "int4:0", "int4:12")
        }
    assert distance["int8"] < distance["fp8"] < distance["int4:0"] and distance["int4:12"] < distance["int4:0"]


@torch.inference_mode()
@pytest.mark.parametrize("cache", CACHES)
def test_any_chunks_equal_loops_over_the_tokens(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Query i reads the newest keys as they are, and the others from their codes."""
    spec, chosen = decoder(block(MIXERS["rope"])), parse_cache(cache)
    assert isinstance(chosen, QuantizedCache)
    model, tokens = build(spec), random_ids(2, LENGTH)
    found = {
        (kind, size): run(model, open_store(kind, spec, cache, 2), tokens, [*range(0, LENGTH, size), LENGTH])
        for kind in STORES
        for size in (1, 2, 5, LENGTH)
    }
    full = model(tokens)

    def attention(self: AttentionModule, x: Tensor, layout: TokenLayout, state: object = None) -> Tensor:
        q, k = split_heads(self.q_proj(x), self.heads), split_heads(self.k_proj(x), self.kv_heads)
        v = split_heads(self.v_proj(x), self.kv_heads)
        q, k = self.position.rotate(q, k, layout)
        outs, group, codes = [], self.heads // self.kv_heads, [round_trip(a, chosen.format) for a in (k, v)]
        for i in range(x.shape[1]):
            old = max(0, i + 1 - chosen.recent)
            k_i, v_i = (
                torch.cat([c[:, :, :old], a[:, :, old : i + 1]], 2).repeat_interleave(group, 1)
                for c, a in zip(codes, (k, v), strict=True)
            )
            outs.append((q[:, :, i : i + 1] @ k_i.transpose(-1, -2) * self.scale).softmax(-1) @ v_i)
        return self.o_proj(merge_heads(torch.cat(outs, 2)))

    monkeypatch.setattr(AttentionModule, "forward", attention)
    expected = model(tokens)
    for case, logits in found.items():
        assert error(logits, expected) < 1e-12, case
    if chosen.recent >= LENGTH:
        assert error(expected, full) < 1e-12
    else:
        assert error(expected, full) > 1e-5, "the codes are read"


@torch.inference_mode()
@pytest.mark.parametrize("cache", ["int8", "int4:3"])
@pytest.mark.parametrize("mixer", ["alibi, window", "latent"])
def test_rings_and_latents_in_any_chunks(mixer: str, cache: str) -> None:
    spec = decoder(block(MIXERS[mixer]))
    model, tokens = build(spec), random_ids(1, LENGTH)
    expected = run(model, open_store("contiguous", spec, cache), tokens, [0, LENGTH])
    for kind in STORES:
        for cuts in ([0, 7, 8, 9, 17, LENGTH], [*range(LENGTH + 1)]):
            assert error(run(model, open_store(kind, spec, cache), tokens, cuts), expected) < 1e-12


@torch.inference_mode()
@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("cache", ["int8", "int4:5"])
def test_rewind_and_fork(cache: str, kind: str) -> None:
    spec = decoder(block(MIXERS["rope"]))
    model, tokens, other = build(spec), random_ids(1, LENGTH), random_ids(1, LENGTH, seed=4)
    store = open_store(kind, spec, cache, 2, slack=2)
    store.release(1)
    mixed = torch.cat([tokens[:, :12], other[:, 12:]], 1)
    expected = run(model, open_store(kind, spec, cache), mixed, [0, LENGTH])[:, 12:]
    run(model, store, tokens, [0, 12])
    snapshot = store.snapshot(0)
    run(model, store, tokens, [12, 14])
    store.rewind(0, 12)
    assert store.fork(0, 1, snapshot) and store.reserve(0, LENGTH) and store.reserve(1, LENGTH)
    layout = TokenLayout(torch.arange(12, LENGTH).expand(2, -1))
    logits = model(mixed[:, 12:].expand(2, -1), layout, store.begin_forward(layout))
    assert error(logits, expected.expand_as(logits)) < 1e-12


@pytest.mark.parametrize("cache", ["int8", "int4:5"])
def test_batched_preempted_and_reused_equal_alone(cache: str) -> None:
    model, greedy = build(decoder(block(MIXERS["rope"]))), Sampling(max_new=12, temperature=0)
    shared = random_ids(9, seed=1).tolist()
    prompts = [shared + random_ids(n, seed=n).tolist() for n in (1, 3, 6)] + [random_ids(4, seed=9).tolist()]
    single = Engine(model, rows=1, capacity=40, store="contiguous", cache=cache)
    alone = [[token.id for token in single.generate(ids, greedy)] for ids in prompts]
    engine = Engine(
        model, rows=3, capacity=40, store=partial(Paged, blocks=13, block=4, states=16), cache=cache, chunk=5
    )
    for _ in range(2):  # the second time with cached prefixes
        requests = [engine.submit(ids, greedy) for ids in prompts]
        while not engine.idle:
            engine.step()
        assert [[token.id for token in request.new] for request in requests] == alone
    numbers = engine.metrics()
    assert numbers["preemptions"] > 0 and numbers["prefix_hit_tokens"] > 0 and numbers["evicted_tokens"] == 0
    engine.store.check()


@pytest.mark.ledger("kv.quantised")
def test_bytes_halve_and_quarter() -> None:
    declared = PerToken({"k": (2, 64), "v": (2, 64)}, rotated=())
    sizes = {}
    for name in (None, *FORMATS):
        memory = ((declared if name is None else QuantizedCache(name).quantize(declared),),)
        store = Paged(memory, 1, 128, torch.bfloat16)
        sizes[name] = bytes_of(store)
    full = sizes[None]
    assert sizes["int8"] / full == 66 / 128 and sizes["fp8"] / full == 68 / 128 and sizes["int4"] / full == 35 / 128


def test_no_more_newest_tokens_are_allocated_than_a_row_has() -> None:
    spec = decoder(block(MIXERS["rope"]))
    for kind in STORES:
        whole, more = (bytes_of(open_store(kind, spec, f"int8:{recent}")) for recent in (64, 10**6))
        assert more == whole, kind


def test_what_cannot_be_quantized_is_refused() -> None:
    odd = decoder(block(Attention(4, 2, head_dim=5)))
    with pytest.raises(ValueError, match="5 inputs of 4 bits do not fill whole bytes"):
        Engine(build(odd), cache="int4")
    sparse = decoder(block(NativeSparse(4, 2, None, 4, 2, 4, 3, 3, Rope())))
    with pytest.raises(ValueError, match="needs every key once.*use int4:0"):
        Engine(build(sparse), cache="int4")
    assert Engine(build(sparse), rows=1, capacity=16, cache="int4:0").generate([1, 2], Sampling(max_new=3))
    with pytest.raises(ValueError, match="is not of the form int4:64"):
        parse_cache("int4:a")


def test_parts_of_other_layers_stay_as_they_are() -> None:
    assert isinstance(QuantizedCache("int8").quantize(PerToken({"k": (1, 4)}, rotated=())), QuantizedTokens)
    assert PlainArrays(torch.float32).encode("k", torch.ones(1))["k"].item() == 1


@pytest.mark.parametrize("cache", ["int8", "int4:5", "sinks:2+6", "window:5", "h2o:8", "snapkv:8"])
def test_speculation_equals_plain_decoding_with_the_same_cache(cache: str) -> None:
    """Rejected drafts are rewound; rings have the slack for them."""
    model, greedy = build(decoder(block(MIXERS["rope"]))), Sampling(max_new=40, temperature=0)
    prompts = [random_ids(4, seed=n).tolist() * (n + 1) for n in range(4)]
    outputs, rejected = [], 0
    for speculation in (None, PromptLookup(1, 3)):
        engine = Engine(model, rows=3, capacity=80, cache=cache, chunk=7, speculation=speculation)
        requests = [engine.submit(ids, greedy) for ids in prompts]
        while not engine.idle:
            engine.step()
        outputs.append([[token.id for token in request.new] for request in requests])
        rejected = engine.metrics().get("draft_tokens", 0) - engine.metrics().get("accepted_draft_tokens", 0)
    assert outputs[0] == outputs[1] and rejected > 0
