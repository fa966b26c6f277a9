"""Cached = whole, chunked = whole, paged = contiguous, batched = alone, padded = unpadded, packed = separate."""

import pytest
import torch

from regard.at import At
from tests.laws import MODELS, STORES, TOLERANCE, build, error, open_store, places, text

pytestmark = [
    pytest.mark.parametrize("name", MODELS),
    pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).removeprefix("torch.")),
]
LENGTH = 12


def span_at(positions: range, batch: int) -> At:
    return At(torch.tensor(list(positions)).expand(batch, len(positions)))


@pytest.mark.parametrize("kind", STORES)
def test_cached_is_whole(name: str, dtype: torch.dtype, kind: str) -> None:
    model, tokens = build(MODELS[name], dtype), text(2, LENGTH)
    store = open_store(kind, model, rows=2)
    steps = [model(tokens[:, t : t + 1], span_at(range(t, t + 1), 2), store.states) for t in range(LENGTH)]
    assert error(torch.cat(steps, 1), model(tokens)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("cut", range(1, LENGTH))
def test_chunked_is_whole(name: str, dtype: torch.dtype, kind: str, cut: int) -> None:
    model, tokens = build(MODELS[name], dtype), text(2, LENGTH)
    store = open_store(kind, model, rows=2)
    first = model(tokens[:, :cut], span_at(range(cut), 2), store.states)
    second = model(tokens[:, cut:], span_at(range(cut, LENGTH), 2), store.states)
    assert error(torch.cat([first, second], 1), model(tokens)) <= TOLERANCE[dtype]


def test_paged_is_contiguous(name: str, dtype: torch.dtype) -> None:
    """Bit for bit: the same numbers in the same order, wherever they lie."""
    model, tokens = build(MODELS[name], dtype), text(2, LENGTH)
    stores = [open_store(kind, model, rows=2) for kind in STORES]
    for low, high in ((0, 5), (5, 6), (6, 7), (7, LENGTH)):
        one, other = (model(tokens[:, low:high], span_at(range(low, high), 2), s.states) for s in stores)
        assert torch.equal(one, other)


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_padded_batch_is_each_alone(name: str, dtype: torch.dtype, left: bool) -> None:
    model, tokens, lengths = build(MODELS[name], dtype), text(4, LENGTH), [1, 5, 11, LENGTH]
    at = places(lengths, LENGTH, left)
    logits = model(tokens, at)
    for row, seen in enumerate(at.valid):
        assert error(logits[row, seen], model(tokens[row, seen].unsqueeze(0))[0]) <= TOLERANCE[dtype]


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_ragged_rows_decode_as_each_alone(name: str, dtype: torch.dtype, kind: str, left: bool) -> None:
    """A padded prefill, then steps at every row's own position, in rows of the store that are not the batch's."""
    model, tokens, lengths = build(MODELS[name], dtype), text(3, LENGTH), [2, 6, 9]
    store, rows = open_store(kind, model, rows=5), torch.tensor([4, 0, 2])
    at = places(lengths, 9, left)
    prompt = torch.zeros_like(tokens[:, :9])
    for row, seen in enumerate(at.valid):
        prompt[row, seen] = tokens[row, : lengths[row]]
    model(prompt, At(at.positions, valid=at.valid, rows=rows), store.states)
    alone = [model(tokens[row : row + 1])[0] for row in range(3)]
    for step in range(3):
        where = torch.tensor(lengths).unsqueeze(-1) + step
        logits = model(tokens.gather(1, where), At(where, rows=rows), store.states)[:, 0]
        expected = torch.stack([alone[row][length + step] for row, length in enumerate(lengths)])
        assert error(logits, expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_rows_may_go_on_by_different_lengths(name: str, dtype: torch.dtype, kind: str, left: bool) -> None:
    """Chunks of 4 and 0, then 0 and 3, then 2 and 4 tokens: padding changes nothing, wherever it stands."""
    model, tokens = build(MODELS[name], dtype), text(2, LENGTH)
    store, whole, done = open_store(kind, model, rows=2), model(tokens), [0, 0]
    for lengths in ([4, 0], [0, 3], [2, 4]):
        at = places(lengths, 4, left)
        positions = (at.positions + torch.tensor(done).unsqueeze(-1)).where(at.valid, 0)
        logits = model(tokens.gather(1, positions), At(positions, valid=at.valid), store.states)
        for row, seen in enumerate(at.valid):
            expected = whole[row, done[row] : done[row] + lengths[row]]
            if lengths[row]:
                assert error(logits[row, seen], expected) <= TOLERANCE[dtype]
            done[row] += lengths[row]


@pytest.mark.parametrize("kind", STORES)
def test_a_used_row_begins_anew(name: str, dtype: torch.dtype, kind: str) -> None:
    model, old, new = build(MODELS[name], dtype), text(1, LENGTH, seed=3), text(1, 7)
    store = open_store(kind, model, rows=1)
    model(old, span_at(range(LENGTH), 1), store.states)
    store.release(0)
    assert store.reserve(0, 7)
    store.span = 8
    assert error(model(new, span_at(range(7), 1), store.states), model(new)) <= TOLERANCE[dtype]


def test_packed_is_separate(name: str, dtype: torch.dtype) -> None:
    """Documents in one row, also longer than a chunk of the recurrence and with padding at the end."""
    model, lengths, pads = build(MODELS[name], dtype), [3, 1, 45, 20, 8], 4
    documents = [text(1, length, seed=length) for length in lengths]
    tokens = torch.cat([*documents, torch.zeros(1, pads, dtype=torch.int64)], 1)
    positions = torch.cat([torch.arange(length) for length in [*lengths, pads]]).unsqueeze(0)
    segments = torch.repeat_interleave(torch.arange(6), torch.tensor([*lengths, pads])).unsqueeze(0)
    packed = model(tokens, At(positions, segments, valid=segments < 5))
    separate = torch.cat([model(document) for document in documents], 1)
    assert error(packed[:, :-pads], separate) <= TOLERANCE[dtype]


@pytest.mark.parametrize("kind", STORES)
def test_packed_documents_are_not_remembered(name: str, dtype: torch.dtype, kind: str) -> None:
    model, tokens = build(MODELS[name], dtype), text(1, 6)
    at = At(torch.tensor([[0, 1, 2, 0, 1, 2]]), segments=torch.tensor([[0, 0, 0, 1, 1, 1]]))
    with pytest.raises(ValueError, match="packed documents cannot be remembered"):
        model(tokens, at, open_store(kind, model, rows=1).states)
