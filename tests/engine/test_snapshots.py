"""Rows are rewound to a snapshot or forked from one, for every kind of state."""

import random

import pytest
import torch

from regard.engine.stores import STORES
from regard.engine.stores.base import CannotRewind
from regard.engine.stores.contiguous import Contiguous
from regard.engine.stores.paged import Paged
from regard.kernels.attention.patterns.window import SinksAndWindow, Window
from regard.layout import TokenLayout
from regard.parts.attention import Attention
from regard.parts.linear_attention import LinearAttention
from regard.parts.position.rope import Rope
from regard.parts.recurrent import LSTM
from regard.parts.short_convolution import ShortConvolution
from regard.parts.ssm.mamba import Mamba
from regard.parts.ssm.mamba2 import Mamba2
from regard.parts.ssm.s4 import S4D
from tests.kernels.largest_tensor import LargestTensor
from tests.laws import block, build, decoder, error, random_ids

FULL, WINDOWED = Attention(4, 2, position=Rope()), Attention(4, 2, position=Rope(), mask=Window(4))
HYBRIDS = {
    "attention": [FULL],
    "window, full": [WINDOWED, FULL],
    "linear, full": [LinearAttention(4), FULL],
    "convolution, window, linear": [ShortConvolution(3), WINDOWED, LinearAttention(3)],
    "mamba, mamba, full": [Mamba(4), Mamba(4), FULL],
    "mamba2, sinks": [Mamba2(4, 8), Attention(4, 2, mask=SinksAndWindow(1, 3))],
    "lstm, s4d, window": [LSTM(), S4D(4), WINDOWED],
}
SPECS = {name: decoder(*(block(mixer) for mixer in mixers)) for name, mixers in HYBRIDS.items()}
BLOCK = 4


def open_store(kind: str, spec, rows: int = 4, capacity: int = 40, blocks: int = 40) -> Contiguous | Paged:
    options = {"block": BLOCK, "blocks": blocks} if kind == "paged" else {}
    return STORES[kind](spec.memory(), rows, capacity, torch.float64, slack=1, **options)


def run_chunk(model, store, row: int, tokens: torch.Tensor, start: int) -> torch.Tensor:
    """The logits (L, V) of tokens (L,), which continue this row at position `start`."""
    assert store.reserve(row, start + len(tokens))
    layout = TokenLayout(torch.arange(start, start + len(tokens)).unsqueeze(0), rows=torch.tensor([row]))
    return model(tokens.unsqueeze(0), layout, store.begin_forward(layout))[0]


@torch.inference_mode()
@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("name", SPECS)
def test_rewinding_rejected_drafts_keeps_greedy_decoding_exact(name: str, kind: str) -> None:
    """As in speculative decoding: drafted tokens are processed and rejected, and the output equals greedy decoding."""
    model, rng = build(SPECS[name]), random.Random(1)
    store, output = open_store(kind, SPECS[name]), random_ids(5).tolist()
    run_chunk(model, store, 2, torch.tensor(output[:-1]), 0)
    while len(output) < 30:
        done = len(output) - 1
        with_drafts = [output[-1], *(rng.randrange(31) for _ in range(rng.randint(1, 4)))]
        snapshot = store.snapshot(2)
        assert snapshot.length == done
        run_chunk(model, store, 2, torch.tensor(with_drafts), done)
        store.rewind(2, done, snapshot)
        logits = run_chunk(model, store, 2, torch.tensor(output[-1:]), done)
        output.append(int(logits[-1].argmax()))
    whole = model(torch.tensor([output[:-1]]))[0, 4:]
    assert output[5:] == whole.argmax(-1).tolist()


@torch.inference_mode()
@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("length", [3, 4, 9])
@pytest.mark.parametrize("name", SPECS)
def test_three_rows_are_forked_from_one_prefix(name: str, length: int, kind: str) -> None:
    model, store, prefix = build(SPECS[name]), open_store(kind, SPECS[name]), random_ids(length)
    run_chunk(model, store, 1, prefix, 0)
    snapshot = store.snapshot(1)
    sequences = {row: torch.cat([prefix, random_ids(9, seed=row)]) for row in (1, 3, 0, 2)}
    for row in (3, 0):
        assert store.fork(1, row, snapshot)
    run_chunk(model, store, 1, sequences[1][length : length + 5], length)
    assert store.fork(1, 2, snapshot)  # from an earlier length of a row that has continued
    if kind == "paged":
        whole = length // BLOCK
        assert len({tuple(blocks[:whole]) for blocks in store.owned}) == 1  # shared
        assert all(len(blocks) == -(-length // BLOCK) for row, blocks in enumerate(store.owned) if row != 1)
    for row, tokens in sequences.items():
        start = length + 5 if row == 1 else length
        expected = model(tokens.unsqueeze(0))[0, start:]
        assert error(run_chunk(model, store, row, tokens[start:], start), expected) < 1e-12
        store.release(row)
    if kind == "paged":
        store.check()
        assert len(store.pool.free) == 40
        assert all(not pages.any() for state in store.per_token for pages in state.arrays.values())


@torch.inference_mode()
@pytest.mark.parametrize("kind", STORES)
def test_rewinding_into_a_shared_prefix_leaves_other_rows_unchanged(kind: str) -> None:
    spec = SPECS["linear, full"]
    model, store, prefix = build(spec), open_store(kind, spec), random_ids(8)
    run_chunk(model, store, 0, prefix[:5], 0)
    snapshot_of_5 = store.snapshot(0)
    run_chunk(model, store, 0, prefix[5:], 5)
    store.fork(0, 1, store.snapshot(0))
    store.rewind(0, 5, snapshot_of_5)
    other = torch.cat([prefix[:5], random_ids(8, seed=7)])
    assert error(run_chunk(model, store, 0, other[5:], 5), model(other.unsqueeze(0))[0, 5:]) < 1e-12
    tokens = torch.cat([prefix, random_ids(5, seed=8)])
    assert error(run_chunk(model, store, 1, tokens[8:], 8), model(tokens.unsqueeze(0))[0, 8:]) < 1e-12


@torch.inference_mode()
def test_a_fork_or_rewind_without_a_free_block_changes_nothing() -> None:
    spec = SPECS["attention"]
    model, store = build(spec), open_store("paged", spec, blocks=3)
    tokens = random_ids(12)
    run_chunk(model, store, 0, tokens, 0)
    store.rewind(0, 10)  # the last block is still in use
    assert not store.fork(0, 1, store.snapshot(0)) and not store.owned[1]
    store.rewind(0, 8)
    assert store.fork(0, 1, store.snapshot(0)) and store.reserve(1, 9)
    with pytest.raises(CannotRewind, match="no block is free"):
        store.rewind(0, 6)
    assert store.owned[0] == store.owned[1][:2]
    assert error(run_chunk(model, store, 1, tokens[8:9], 8), model(tokens[:9].unsqueeze(0))[0, 8:]) < 1e-12


@torch.inference_mode()
@pytest.mark.parametrize("kind", STORES)
def test_impossible_rewinds_and_forks_are_refused(kind: str) -> None:
    spec = SPECS["linear, full"]
    model, store, tokens = build(spec), open_store(kind, spec), random_ids(12)
    run_chunk(model, store, 0, tokens[:6], 0)
    snapshot_of_6 = store.snapshot(0)
    run_chunk(model, store, 0, tokens[6:8], 6)
    snapshot_of_8 = store.snapshot(0)
    run_chunk(model, store, 0, tokens[8:], 8)
    run_chunk(model, store, 1, tokens, 0)
    for length, snapshot, message in [
        (6, None, "from 12 to 6 tokens: a recurrent state is a sum"),
        (6, snapshot_of_8, "of row 0 with 8 tokens, not of row 0 with 6"),
        (6, store.snapshot(1), "of row 1 with 12 tokens"),
    ]:
        with pytest.raises(CannotRewind, match=message):
            store.rewind(0, length, snapshot)
    with pytest.raises(ValueError, match="has 12 tokens; it cannot be rewound to 13, choose 0 to 12"):
        store.rewind(0, 13)
    with pytest.raises(ValueError, match="row 1 already has .* release it first"):
        store.fork(0, 1, snapshot_of_6)
    store.rewind(0, 6, snapshot_of_6)
    with pytest.raises(CannotRewind, match="fewer than the 8 tokens of this snapshot"):
        store.fork(0, 2, snapshot_of_8)
    store.rewind(0, 6)  # its current length
    store.rewind(0, 0)
    with pytest.raises(CannotRewind, match="fewer than the 6 tokens of this snapshot"):
        store.fork(0, 2, snapshot_of_6)
    assert error(run_chunk(model, store, 0, tokens, 0), model(tokens.unsqueeze(0))[0]) < 1e-12


@torch.inference_mode()
@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("rows", [None, [1, 2]])
def test_the_memory_of_a_step_does_not_depend_on_the_rows_of_the_store(rows: list[int] | None, kind: str) -> None:
    spec = SPECS["convolution, window, linear"]
    model, sizes = build(spec), []
    for count in (4, 4000):
        store = open_store(kind, spec, rows=count, blocks=40)
        for row in range(4):
            store.reserve(row, 10)
        layout = TokenLayout(torch.tensor([[9], [3]]), rows=None if rows is None else torch.tensor(rows))
        with LargestTensor() as largest:
            model(random_ids(2, 1), layout, store.begin_forward(layout, span=16, check=False))
        sizes.append(largest.numel)
    assert sizes[0] == sizes[1]


@torch.inference_mode()
@pytest.mark.parametrize("kind", STORES)
def test_rewound_slots_are_zero(kind: str) -> None:
    """A masked value is still multiplied by its weight of 0, and 0 · NaN is NaN."""
    model, tokens = build(SPECS["attention"]), random_ids(5)
    model.embedding.weight[0] = torch.nan
    tokens = tokens.clamp_min(1)
    store = open_store(kind, SPECS["attention"])
    run_chunk(model, store, 0, tokens[:2], 0)
    run_chunk(model, store, 0, torch.zeros(1, dtype=torch.int64), 2)
    store.rewind(0, 2)
    found = run_chunk(model, store, 0, tokens[2:3], 2)[0, 1:]  # the head is tied: the logit of the damaged token is NaN
    assert error(found, model(tokens[:3].unsqueeze(0))[0, -1, 1:]) < 1e-9


@torch.inference_mode()
@pytest.mark.parametrize("name", SPECS)
def test_one_layout_can_be_used_with_two_stores(name: str) -> None:
    model, tokens = build(SPECS[name]), random_ids(6).unsqueeze(0)
    stores = [open_store(kind, SPECS[name]) for kind in STORES]
    assert stores[0].reserve(1, 9) and all(store.reserve(0, 6) for store in stores)  # so that their tables differ
    layout = TokenLayout(torch.arange(6).unsqueeze(0))
    for store in stores:
        assert error(model(tokens, layout, store.begin_forward(layout)), model(tokens)) < 1e-9
