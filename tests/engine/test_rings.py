"""A ring buffer keeps the tokens of a window only: the same logits as with all tokens, in constant memory."""

import pytest
import torch

from regard.engine.engine import Engine
from regard.engine.request import Sampling
from regard.engine.stores import STORES
from regard.engine.stores.base import SLACK, CannotRewind
from regard.engine.stores.contiguous import Contiguous, ContiguousStorage
from regard.engine.stores.paged import Paged, PagedStorage
from regard.engine.stores.ring import RingStorage
from regard.kernels.attention.mask import Mask
from regard.kernels.attention.patterns.longformer import Longformer
from regard.kernels.attention.patterns.window import Dilated, SinksAndWindow, Window
from regard.layout import TokenLayout
from regard.models.decoder import Decoder
from regard.parts.attention import Attention
from regard.parts.feedforward import SwiGLU
from regard.parts.latent_attention import LatentAttention
from regard.parts.position.alibi import Alibi
from regard.parts.position.rope import Rope
from regard.parts.scored_attention import ScoredAttention
from regard.parts.state import PerToken
from regard.planning import plan
from tests.laws import block, build, decoder, error, random_ids

LENGTH = 24


def open_store(kind: str, spec: Decoder, slack: int = 1, capacity: int = 64, rows: int = 1) -> Contiguous | Paged:
    options = {"block": 4, "blocks": rows * capacity // 4} if kind == "paged" else {}
    return STORES[kind](spec.memory(), rows, capacity, torch.float64, slack=slack, **options)


def run_chunk(model, store, tokens: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """The logits of the tokens from `start` to `stop`, whose predecessors are in the store."""
    assert store.reserve(0, stop)
    layout = TokenLayout(torch.arange(start, stop).unsqueeze(0))
    return model(tokens[:, start:stop], layout, store.begin_forward(layout))


def decoder_with(mask: Mask) -> Decoder:
    return decoder(block(Attention(4, 2, position=Rope(), mask=mask)))


MASKS = [Window(1), Window(5), Dilated(3, 2), SinksAndWindow(2, 4), Longformer(3, 2, causal=True)]


@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_declares_its_window(mask: Mask) -> None:
    """No key outside the window is allowed, and the oldest one inside it is."""
    positions = torch.arange(40)
    allowed = mask.allows(positions.unsqueeze(-1), positions.unsqueeze(0))
    distances = positions.unsqueeze(-1) - positions.unsqueeze(0)
    assert not (allowed & (distances >= mask.sliding_window) & (positions >= mask.first_tokens)).any()
    assert allowed[39, 39 - mask.sliding_window + 1] and allowed[39, : mask.first_tokens].all()
    assert not Window(3, causal=False).sliding_window and not Longformer(3, 2).sliding_window


@pytest.mark.ledger("sp.window")
@torch.inference_mode()
@pytest.mark.parametrize("slack", [0, 1, 4])
@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.kind)
def test_chunked_equals_whole(mask: Mask, kind: str, slack: int) -> None:
    """Chunks have sizes near one token, near the slack and the window, and larger ones."""
    spec = decoder_with(mask)
    model, tokens = build(spec), random_ids(1, LENGTH)
    whole = model(tokens)
    window = mask.sliding_window
    for size in {1, slack + 1, slack + 2, max(1, window - 1), window, window + 1, 2 * window + slack, LENGTH}:
        store = open_store(kind, spec, slack)
        cuts = [*range(0, LENGTH, size), LENGTH]
        logits = [run_chunk(model, store, tokens, a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
        assert error(torch.cat(logits, 1), whole) < 1e-12
        assert all(isinstance(state, RingStorage) for state in store.storages if state.arrays)


@pytest.mark.parametrize(
    "mixer",
    [
        LatentAttention(3, 8, 6, 4, position=Rope(), mask=Window(4)),
        ScoredAttention(2, mask=SinksAndWindow(1, 3)),
        Attention(4, 2, position=Alibi(), mask=Window(5), sinks=True, softcap=3.0),
    ],
    ids=lambda mixer: mixer.kind,
)
@torch.inference_mode()
def test_every_mixer_with_a_window_has_a_ring(mixer) -> None:
    spec = decoder(block(mixer))
    model, tokens, store = build(spec), random_ids(1, LENGTH), open_store("contiguous", spec)
    logits = [run_chunk(model, store, tokens, a, b) for a, b in [(0, 7), (7, 8), (8, 9), (9, 19), (19, 24)]]
    assert error(torch.cat(logits, 1), model(tokens)) < 1e-12
    assert isinstance(next(iter(store.storages)), RingStorage)


@torch.inference_mode()
def test_a_row_can_restart_without_a_release() -> None:
    """Tokens of the previous sequence are still in the ring, some of them at later positions."""
    spec = decoder_with(Window(5))
    model, store = build(spec), open_store("contiguous", spec)
    for seed, sizes in enumerate([(9, 4), (7, 1, 1), (2, 9), (1, 1, 1, 8)]):
        tokens, done = random_ids(1, 24, seed=seed), 0
        for size in sizes:
            found = run_chunk(model, store, tokens, done, done + size)
            assert error(found, model(tokens[:, : done + size])[:, done:]) < 1e-12
            done += size


@torch.inference_mode()
@pytest.mark.parametrize("kind", STORES)
def test_a_ring_rewinds_up_to_its_slack(kind: str) -> None:
    spec, slack = decoder_with(SinksAndWindow(2, 5)), 3
    model, tokens, other = build(spec), random_ids(1, LENGTH), random_ids(1, LENGTH, seed=9)
    store = open_store(kind, spec, slack)
    run_chunk(model, store, tokens, 0, 20)
    store.rewind(0, 19)
    store.rewind(0, 20 - slack)  # in two steps: the limit is relative to the last written token
    mixed = torch.cat([tokens[:, :17], other[:, 17:]], 1)
    assert error(run_chunk(model, store, mixed, 17, 18), model(mixed[:, :18])[:, 17:]) < 1e-12
    with pytest.raises(CannotRewind, match="a window of 5 has overwritten"):
        store.rewind(0, 15)  # needs the token at 11, which is overwritten
    # the failed rewind changed nothing
    assert error(run_chunk(model, store, mixed, 18, 24), model(mixed)[:, 18:]) < 1e-12
    with pytest.raises(CannotRewind):
        store.rewind(0, 19)
    store.rewind(0, 20)
    continued = torch.cat([mixed[:, :20], tokens[:, 20:]], 1)
    assert error(run_chunk(model, store, continued, 20, 24), model(continued)[:, 20:]) < 1e-12
    store.rewind(0, 0)
    assert error(run_chunk(model, store, other, 0, 9), model(other[:, :9])) < 1e-12


@pytest.mark.ledger("sp.hybrid")
@pytest.mark.parametrize("kind", STORES)
def test_layers_with_windows_have_rings_beside_full_caches(kind: str) -> None:
    """As in Gemma: the caches have the planned bytes, and the tokens are those of the model without a cache."""
    short, long = (block(Attention(4, 2, position=Rope(), mask=mask)) for mask in (Window(6), SinksAndWindow(2, 30)))
    full = block(Attention(4, 2))
    spec = decoder(short, short, long, full)
    store = open_store(kind, spec, capacity=48, rows=3)
    full_storage = {"contiguous": ContiguousStorage, "paged": PagedStorage}[kind]
    expected = 2 * [RingStorage, RingStorage, RingStorage, full_storage]
    assert [type(storage) for storage in store.storages if storage.arrays] == expected
    rings = [storage for storage in store.storages if isinstance(storage, RingStorage)]
    planned = plan(spec, context=48, batch=3, dtype="float64")
    whole_bytes = 2 * 48 * 3 * planned.kv_bytes_per_token // 8  # two of eight layers
    ring_bytes = sum(array[:-1].nbytes for ring in rings for array in ring.arrays.values())  # one slot: invalid tokens
    assert ring_bytes == planned.kv_bytes(slack=rings[0].ring.slack) - whole_bytes
    assert planned.kv_bytes(ring=False) == 4 * whole_bytes > planned.kv_bytes()

    model = build(spec)
    engine = Engine(model, rows=2, capacity=60, store=kind, chunk=7)
    prompts = [random_ids(size, seed=size).tolist() for size in (1, 5, 13, 38)]
    requests = [engine.submit(ids, Sampling(max_new=20, temperature=0)) for ids in prompts]
    while not engine.idle:
        engine.step()
    for request in requests:
        with torch.inference_mode():
            logits = model(torch.tensor([request.tokens[:-1]]))[0, len(request.ids) - 1 :]
        assert [token.id for token in request.new] == logits.argmax(-1).tolist()


def test_memory_does_not_depend_on_the_length() -> None:
    def bytes_for(capacity: int, size: int) -> int:
        memory = decoder_with(Window(size)).memory()
        store = Contiguous(memory, 2, capacity, torch.float32)
        return sum(array[:-1].nbytes for storage in store.storages for array in storage.arrays.values())

    assert bytes_for(10**9, 64) == bytes_for(1000, 64)
    assert bytes_for(1000, 128) * (64 + SLACK) == bytes_for(1000, 64) * (128 + SLACK)
    assert bytes_for(40, 64) < bytes_for(1000, 64)  # a ring is not larger than the capacity


@torch.inference_mode()
def test_positions_may_exceed_the_number_of_slots() -> None:
    """Sinks and a window, at positions much larger than the number of tokens that a full cache could hold."""
    spec, start = decoder_with(SinksAndWindow(2, 4)), 10**8
    model, tokens = build(spec), random_ids(1, 16)
    store = Contiguous(spec.memory(), 1, 10**9, torch.float64)
    run_chunk(model, store, tokens, 0, 2)
    steps = []
    for t in range(2, 16):
        layout = TokenLayout(torch.tensor([[start + t]]))
        steps.append(model(tokens[:, t : t + 1], layout, store.begin_forward(layout, check=False)))
    positions = torch.cat([torch.arange(2), start + torch.arange(2, 16)]).unsqueeze(0)
    assert error(torch.cat(steps, 1), model(tokens, TokenLayout(positions))[:, 2:]) < 1e-9


def test_layers_with_equal_windows_share_a_ring_buffer() -> None:
    spec = decoder(block(Attention(2, mask=Window(5)), SwiGLU(8)), block(Attention(4, mask=Window(5))))
    storages = open_store("contiguous", spec).storages
    rings = [storage.ring for storage in storages if isinstance(storage, RingStorage)]
    assert len(rings) == 4 and len(set(rings)) == 1
    assert isinstance(spec.memory()[0][0], PerToken) and spec.memory()[0][0].window == 5
