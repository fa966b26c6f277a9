"""A cache of the first tokens and the newest ones: equal to loops over the kept tokens, in any chunks, without end."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from regard.engine.caches import Streaming, parse_cache
from regard.engine.engine import Engine
from regard.engine.memory import bytes_of
from regard.engine.request import Sampling
from regard.engine.stores import STORES
from regard.engine.stores.base import CannotRewind
from regard.evals.cached_loss import cached_losses
from regard.layout import TokenLayout
from regard.models.decoder import Decoder
from regard.parts.attention import Attention, AttentionModule
from regard.parts.latent_attention import LatentAttention, LatentAttentionModule
from regard.parts.linear_attention import LinearAttention
from regard.parts.native_sparse_attention import NativeSparse
from regard.parts.position.alibi import Alibi
from regard.parts.position.base import NoPosition
from regard.parts.position.learned import Learned
from regard.parts.position.rope import Rope
from regard.parts.position.rope_scaling import DynamicNTK, Yarn
from regard.parts.position.t5 import T5Buckets
from regard.parts.split_heads import merge_heads, split_heads
from tests.laws import block, build, decoder, error, random_ids

LENGTH, SINKS, WINDOW = 26, 2, 5
CACHES = [Streaming(WINDOW, SINKS), Streaming(WINDOW)]


def with_context(tokens: int) -> Decoder:
    return replace(decoder(block(MIXERS["rope"])), context=tokens)


def kept_tokens(i: int, cache: Streaming) -> list[int]:
    return [j for j in range(i + 1) if j < cache.sinks or j > i - cache.window]


def attend_in_loops(module, q: Tensor, k: Tensor, v: Tensor, cache: Streaming, rotated: slice) -> Tensor:
    """The outputs (B, H, L, E) of queries that attend to the kept keys, at positions counted among them."""
    outs, group = [], q.shape[1] // k.shape[1]
    for i in range(q.shape[2]):
        kept = kept_tokens(i, cache)
        positions = torch.arange(len(kept)).expand(len(q), -1)
        query = TokenLayout(positions[:, -1:])
        layout = query.with_keys(positions)
        q_i, k_i = q[:, :, i : i + 1].clone(), k[:, :, kept].clone()
        q_i[..., rotated], _ = module.position.rotate(q_i[..., rotated], q_i[..., rotated], query)
        k_i[..., rotated], _ = module.position.rotate(k_i[..., rotated], k_i[..., rotated], TokenLayout(positions))
        scores = q_i @ k_i.repeat_interleave(group, 1).transpose(-1, -2) * module.scale
        bias = module.position.bias(layout)
        scores = scores if bias is None else scores + bias.values(layout, scores.dtype)
        outs.append(scores.softmax(-1) @ v[:, :, kept].repeat_interleave(group, 1))
    return torch.cat(outs, 2)


def use_loops(monkeypatch: pytest.MonkeyPatch, cache: Streaming) -> None:
    """Compute attention in loops over the kept tokens."""

    def attention(self: AttentionModule, x: Tensor, layout: TokenLayout, state: object = None) -> Tensor:
        q = split_heads(self.q_proj(x), self.heads)
        k, v = (split_heads(projection(x), self.kv_heads) for projection in (self.k_proj, self.v_proj))
        return self.o_proj(merge_heads(attend_in_loops(self, q, k, v, cache, slice(None))))

    def latent(self: LatentAttentionModule, x: Tensor, layout: TokenLayout, state: object = None) -> Tensor:
        q = split_heads(self.q_proj(x), self.heads)  # (B, H, L, nope + rope)
        c = self.latent_norm(self.latent_proj(x))  # (B, L, rank)
        k, v = (torch.einsum("blr,hnr->bhln", c, up) for up in (self.k_up, self.v_up))
        k = torch.cat([k, self.k_rope_proj(x).unsqueeze(1).expand(-1, self.heads, -1, -1)], -1)
        return self.o_proj(merge_heads(attend_in_loops(self, q, k, v, cache, slice(self.dims[0], None))))

    monkeypatch.setattr(AttentionModule, "forward", attention)
    monkeypatch.setattr(LatentAttentionModule, "forward", latent)


def open_store(kind: str, spec: Decoder, cache: Streaming, slack: int, rows: int = 1):
    options = {"block": 4} if kind == "paged" else {}
    store = STORES[kind](cache.declare(spec.memory()), rows, 64, torch.float64, slack=slack, **options)
    for row in range(rows):
        assert store.reserve(row, LENGTH)
    return store


def run(model, store, tokens: Tensor, cuts: list[int]) -> Tensor:
    logits = []
    for start, stop in zip(cuts, cuts[1:], strict=False):
        layout = TokenLayout(torch.arange(start, stop).expand(len(tokens), -1))
        logits.append(model(tokens[:, start:stop], layout, store.begin_forward(layout)))
    return torch.cat(logits, 1)


MIXERS = {
    "rope": Attention(4, 2, position=Rope()),
    "partial interleaved rope": Attention(3, 1, position=Rope(share=0.5, layout="interleaved")),
    "yarn": Attention(4, 4, position=Rope(scaling=Yarn(4.0, 16))),
    "alibi": Attention(4, 2, position=Alibi()),
    "t5": Attention(4, 2, position=T5Buckets(8, 12)),
    "none": Attention(4, 2, position=NoPosition()),
    "latent": LatentAttention(3, 8, 6, 4, position=Rope()),
}


@pytest.mark.ledger("kv.sinks", "kv.evict")
@torch.inference_mode()
@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize("mixer", MIXERS)
def test_streaming_equals_loops_over_the_kept_tokens(mixer: str, cache: Streaming, monkeypatch) -> None:
    spec = decoder(block(MIXERS[mixer]))
    model, tokens = build(spec), random_ids(2, LENGTH)
    found = {}
    cases = product(STORES, (0, 3), (1, 2, 4, 9, LENGTH)) if mixer == "rope" else product(STORES, (1,), (5,))
    for kind, slack, size in cases:
        cuts = [*range(0, LENGTH, size), LENGTH]
        found[kind, slack, size] = run(model, open_store(kind, spec, cache, slack, 2), tokens, cuts)
    full = model(tokens)
    use_loops(monkeypatch, cache)
    expected = model(tokens)
    for case, logits in found.items():
        assert error(logits, expected) < 1e-11, case
    assert error(full, expected) > 1e-3, "the eviction changes the output"


@torch.inference_mode()
def test_padded_chunks_and_rows_of_different_lengths() -> None:
    """Padding repeats a position, and each row has its own shifts."""
    spec, cache = decoder(block(MIXERS["rope"])), CACHES[0]
    model, tokens = build(spec), random_ids(2, LENGTH)
    alone = [run(model, open_store("contiguous", spec, cache, 1), tokens[b : b + 1], [0, LENGTH])[0] for b in (0, 1)]
    store, done = open_store("contiguous", spec, cache, 1, 3), [0, 0]
    rows = torch.tensor([2, 0])
    for sizes in ((9, 3), (1, 8), (1, 1), (7, 2), (3, 9)):
        width = max(sizes)
        valid = torch.arange(width) < torch.tensor(sizes).unsqueeze(1)
        positions = torch.tensor(done).unsqueeze(1) + torch.arange(width).where(valid, 0)
        layout = TokenLayout(positions, valid=valid, rows=rows)
        logits = model(tokens.gather(1, positions), layout, store.begin_forward(layout))
        for b, size in enumerate(sizes):
            assert error(logits[b, :size], alone[b][done[b] : done[b] + size]) < 1e-12
            done[b] += size


@torch.inference_mode()
def test_rewind_fork_and_reuse_of_a_row() -> None:
    spec, cache = decoder(block(MIXERS["rope"])), CACHES[0]
    model, tokens = build(spec), random_ids(1, LENGTH)
    expected = run(model, open_store("contiguous", spec, cache, 2), tokens, [0, LENGTH])
    store = open_store("contiguous", spec, cache, 2, 2)
    run(model, store, tokens, [0, 20])
    snapshot = store.snapshot(0)
    run(model, store, random_ids(1, LENGTH, seed=3), [20, 22])
    store.rewind(0, 20)  # within the slack
    assert error(run(model, store, tokens, [20, 26]), expected[:, 20:]) < 1e-12
    with pytest.raises(CannotRewind, match="a window of 5 has overwritten"):
        store.rewind(0, 18)
    store.rewind(0, 20, snapshot)
    assert store.fork(0, 1, snapshot)
    layout = TokenLayout(torch.arange(20, 26).unsqueeze(0), rows=torch.tensor([1]))
    assert error(model(tokens[:, 20:], layout, store.begin_forward(layout)), expected[:, 20:]) < 1e-12
    store.release(0)
    assert error(run(model, store, tokens, [0, 7, LENGTH]), expected) < 1e-12


@pytest.mark.ledger("kv.sinks")
def test_an_engine_generates_past_the_context_in_constant_memory() -> None:
    spec = with_context(16)
    model = build(spec)
    engine = Engine(model, rows=2, cache="sinks:2+6", chunk=4)
    size = sum(array.nbytes for storage in engine.store.storages for array in storage.arrays.values())
    requests = [engine.submit(random_ids(n, seed=n).tolist(), Sampling(max_new=60, temperature=0)) for n in (3, 40, 9)]
    while not engine.idle:
        engine.step()
    assert [len(request.new) for request in requests] == [60] * 3
    assert size == sum(array.nbytes for storage in engine.store.storages for array in storage.arrays.values())
    for request in requests:  # alone, in single steps
        store = STORES["contiguous"](Streaming(6, 2).declare(spec.memory()), 1, 200, torch.float64)
        with torch.inference_mode():
            logits = run(model, store, torch.tensor([request.tokens]), list(range(len(request.tokens))))
        assert logits[0, len(request.ids) - 1 :].argmax(-1).tolist() == [token.id for token in request.new]


@pytest.mark.parametrize(("text", "message"), [
    ("sinks:4", "is not of the form sinks:4+1020"),
    ("window:x", "is not of the form window:1024"),
    ("sinks:٤+١٠", "is not of the form sinks:4+1020"),
    ("sink:4+10", "there is no cache 'sink:4+10'; choose one of int8, fp8, int4:64, sinks:4+1020, window:1024, h2o:"),
    ("window:0", "the window must be at least 1"),
    ("sinks:4+20", "24 tokens exceed the model's context of 16"),
])  # fmt: skip
def test_wrong_descriptions_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Engine(build(with_context(16)), cache=text)
    assert message in str(caught.value)


@pytest.mark.parametrize(("spec", "message"), [
    (decoder(block(Attention(4)), position=Learned(32)), "learned positions are added to the embeddings"),
    (decoder(block(Attention(4, position=Rope(scaling=DynamicNTK(2.0, 16))))), "cannot leave out tokens"),
    (decoder(block(NativeSparse(4, 2, None, 4, 2, 4, 3, 3, Rope()))), "cannot leave out tokens"),
    (decoder(block(LinearAttention(4))), "no layer of this model keeps keys and values"),
])  # fmt: skip
def test_models_that_cannot_stream_are_refused(spec: Decoder, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(build(spec), cache="sinks:1+4")


def test_descriptions_are_read_and_written() -> None:
    for text in ("sinks:4+1020", "window:1024"):
        assert str(parse_cache(text)) == text


@pytest.mark.slow
@pytest.mark.ledger("kv.sinks")
def test_a_hundred_thousand_tokens_are_read_in_constant_memory() -> None:
    model, ids = build(with_context(128), torch.float32), random_ids(1, 100_001)
    losses = list(cached_losses(model, ids, "sinks:4+60", chunk=250))
    assert sum(loss.numel() for loss in losses) == 100_000 and all(loss.isfinite().all() for loss in losses)
    early, late = (torch.cat(part, 1).mean().item() for part in (losses[2:40], losses[-40:]))
    assert abs(early - late) < 0.2, "random tokens stay equally unlikely, however far from the start"
    store = STORES["contiguous"](Streaming(60, 4).declare(model.spec.memory()), 1, 10**9, torch.float32)
    assert bytes_of(store) == 81 * 4 * sum(heads * dim * 2 for heads, dim in [(2, 6)] * 2)  # 4 + 60, slack 16, one more
