"""`verify` finds faults: each test breaks a model on purpose, and a law must fail.

The faults are common ones: a window off by one in decoding, a missing bias, a recurrent state that is not reset,
padding that is attended to, documents that attend to each other, tokens cached in the wrong slot.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
import torch

from regard.engine.speculation.speculation import Speculation
from regard.engine.stores import recent as stores_recent
from regard.engine.stores.contiguous import Contiguous
from regard.engine.stores.eviction_rules import PromptWindow, top
from regard.engine.stores.paged import Paged
from regard.engine.stores.recent import join_keys
from regard.engine.stores.ring import RingBuffer
from regard.engine.stores.rows import CheckedRows, RowTable, rows_of
from regard.engine.stores.states import FixedStorage
from regard.engine.stores.streaming import StreamingRing
from regard.formats.integers import Integer
from regard.kernels.attention import mask as masks
from regard.kernels.attention.patterns.window import Window
from regard.layout import TokenLayout
from regard.models.interleaved import InterleavedModule
from regard.parts.attention import Attention
from regard.parts.linear_attention import LinearAttention
from regard.parts.position import rope
from regard.parts.position.alibi import Alibi, AlibiModule
from regard.parts.position.learned import Learned, LearnedModule
from regard.parts.position.rope import Rope
from regard.verification.laws import LAWS, weights
from regard.verification.outcome import within_tolerance
from regard.verification.report import attempt
from regard.verification.trials import trials
from tests.laws import OTHERS, block, broken_laws, build, decoder

ROPE = decoder(block(Attention(4, 2, position=Rope())))
ALIBI = decoder(block(Attention(4, position=Alibi())))
WINDOW = decoder(block(Attention(4, position=Rope(), mask=Window(5))))
LINEAR = decoder(block(LinearAttention(4)))
LEARNED = decoder(block(Attention(4)), position=Learned(96))
IMAGES = OTHERS["interleaved images"]


def broken(spec, laws: Collection[str] = LAWS) -> set[str]:
    return {law for part, law in broken_laws(build(spec), 12, laws=laws) if part == ""}


def breaks(spec, *laws: str) -> bool:
    return broken(spec, laws) == set(laws)


def omit_bias_when_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    original = AlibiModule.bias
    monkeypatch.setattr(
        AlibiModule, "bias", lambda self, layout: None if layout.positions.shape[1] == 1 else original(self, layout)
    )


def rotate_by_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """RoPE rotates by the index of a token in its forward instead of by its position in the sequence."""
    original = rope.rotations

    def rotations(layout: TokenLayout, *args):
        slots = torch.arange(layout.positions.shape[1]).expand_as(layout.positions)
        return original(replace(layout, positions=slots), *args)

    monkeypatch.setattr(rope, "rotations", rotations)


@pytest.mark.parametrize("spec", [ROPE, ALIBI, WINDOW, LINEAR, LEARNED, IMAGES])
def test_correct_models_keep_every_law(spec) -> None:
    assert not broken(spec)


def test_verify_finds_a_window_that_is_one_longer_when_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Window.allows
    longer_window = Window(6)

    def allows(self, q, k):
        return original(longer_window if q.shape[-2] == 1 else self, q, k)

    monkeypatch.setattr(Window, "allows", allows)
    assert breaks(WINDOW, "cached = whole")


def test_verify_finds_a_bias_that_is_zero_when_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    omit_bias_when_decoding(monkeypatch)
    assert breaks(ALIBI, "cached = whole", "ragged decode = alone")


def test_verify_finds_rotations_by_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    rotate_by_slot(monkeypatch)
    assert breaks(ROPE, "cached = whole")


def test_verify_finds_learned_positions_by_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left padding then shifts the positions, and a packed document continues those of the previous document."""

    def embed_by_slot(self, x, layout):
        return x + self.table(torch.arange(x.shape[1])).expand_as(x)

    monkeypatch.setattr(LearnedModule, "embed", embed_by_slot)
    assert breaks(LEARNED, "padded left = right = alone", "packed = separate")


def test_verify_finds_a_state_that_is_not_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self, layout, **empty):
        return tuple(self.arrays[name][rows_of(layout)] for name in empty)

    monkeypatch.setattr(FixedStorage, "read", read)
    assert breaks(LINEAR, "used row = fresh row", "cached = whole")


def test_verify_finds_padding_that_is_attended_to(monkeypatch: pytest.MonkeyPatch) -> None:
    original = masks.compute_attention_mask
    monkeypatch.setattr(
        masks, "compute_attention_mask", lambda layout, mask: original(replace(layout, valid=None), mask)
    )
    assert breaks(ROPE, "padded left = right = alone")


def test_verify_finds_documents_that_attend_to_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    original = masks.compute_attention_mask
    monkeypatch.setattr(
        masks, "compute_attention_mask", lambda layout, mask: original(replace(layout, segments=None), mask)
    )
    assert breaks(ROPE, "packed = separate")


def test_verify_finds_packed_documents_that_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowTable, "check", lambda self, layout, capacity: CheckedRows([], []))
    assert breaks(ROPE, "packed is refused by a store")


def test_verify_finds_a_recurrence_that_rewinds_without_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FixedStorage, "why_not_rewind", lambda self, row, length: None)
    assert breaks(LINEAR, "rewound = recomputed")


def test_verify_finds_a_snapshot_that_is_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    original = RowTable.snapshot

    def snapshot_without_copy(self, row: int):
        return replace(original(self, row), arrays=[state.row_arrays(row) for state in self.overwriting])

    monkeypatch.setattr(RowTable, "snapshot", snapshot_without_copy)
    assert breaks(LINEAR, "rewound = recomputed")


def test_verify_finds_a_ring_that_is_one_too_short(monkeypatch: pytest.MonkeyPatch) -> None:
    original = RingBuffer.__init__

    def init_one_slot_short(self, window: int, first: int, slack: int, rows) -> None:
        original(self, window - 2, first, slack, rows)  # with a slack of one token, one slot too few

    monkeypatch.setattr(RingBuffer, "__init__", init_one_slot_short)
    assert breaks(WINDOW, "ring = all tokens", "cached = whole", "chunked = whole")


def test_verify_finds_a_ring_that_rewinds_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RingBuffer, "why_not_rewind", lambda self, row, length: None)
    monkeypatch.setattr(RowTable, "restore", lambda self, row, copies, length: None)
    assert breaks(WINDOW, "rewound = recomputed")


def test_verify_finds_a_shared_block_that_is_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def share(self, block: int, row: int, tokens: int) -> None:
        self.pool.own(row, [block])
        self.list_blocks(row, 0)

    monkeypatch.setattr(Paged, "copy", share)
    assert breaks(ROPE, "forked = recomputed")


@pytest.mark.parametrize("spec", [ROPE, LINEAR, WINDOW], ids=["rope", "linear", "window"])
def test_verify_finds_prefixes_that_are_mistaken_for_one_another(monkeypatch: pytest.MonkeyPatch, spec) -> None:
    monkeypatch.setattr("regard.engine.stores.blocks.next_key", lambda previous, tokens: previous + bytes(1))
    assert breaks(spec, "prefix hit = miss")


def test_verify_finds_a_shared_block_that_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Paged.free_blocks

    def free_shared(self, row: int, keep: int) -> None:
        for owned in self.owned[row][keep:]:
            self.pool.owner_counts[owned] = 1
        original(self, row, keep)

    monkeypatch.setattr(Paged, "free_blocks", free_shared)
    assert breaks(ROPE, "forked = recomputed")


def test_verify_finds_images_of_another_row(monkeypatch: pytest.MonkeyPatch) -> None:
    original = InterleavedModule.embed
    monkeypatch.setattr(
        InterleavedModule,
        "embed",
        lambda self, tokens, images: original(self, tokens, None if images is None else images.roll(1, 0)),
    )
    assert breaks(IMAGES, "batched = alone", "packed = separate")


def test_verify_finds_rotations_by_slot_after_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding after an image rotates by other positions than the whole forward."""
    rotate_by_slot(monkeypatch)
    assert breaks(IMAGES, "cached = whole", "chunked = whole")


def test_every_law_applies_to_images_or_states_why_not() -> None:
    """An image takes 12 tokens, so the sequences of the laws are lengthened to contain one."""
    outcomes = {law: attempt(law, trials(build(IMAGES), 12)[""]) for law in LAWS}
    skipped = {law: outcome.note for law, outcome in outcomes.items() if outcome.result == "not applicable"}
    assert all(skipped.values()) and skipped.keys() <= {
        "recurrent = parallel",
        "ring = all tokens",
        "greedy engine = greedy forward",
        "preempted = undisturbed",
        "prefix hit = miss",
        "speculative = plain",
        "exported and imported = original",
    }
    short_context = replace(IMAGES, decoder=replace(IMAGES.decoder, context=20))
    assert "an image takes 12 tokens" in attempt("cached = whole", trials(build(short_context), 12)[""]).note


def test_verify_finds_tokens_in_the_wrong_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Contiguous.place

    def place_one_slot_later(self, layout, span):
        placement = original(self, layout, span)
        return placement._replace(slots=(placement.slots + 1) % self.capacity)

    monkeypatch.setattr(Contiguous, "place", place_one_slot_later)
    assert breaks(ROPE, "cached = whole", "paged = contiguous")


def test_verify_finds_blocks_that_two_rows_own(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Paged.reserve

    def share_blocks(self, row: int, length: int) -> bool:
        reserved = original(self, row, length)
        self.upload()
        self.block_table[row] = self.block_table[0]
        return reserved

    monkeypatch.setattr(Paged, "reserve", share_blocks)
    assert breaks(ROPE, "ragged decode = alone", "preempted = undisturbed")


def test_verify_finds_a_draft_whose_row_is_not_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request continues with the cache of another candidate than the one that was accepted."""

    monkeypatch.setattr(Speculation, "adopt", lambda self, request, branch: None)
    assert breaks(ROPE, "speculative = plain")


def test_an_error_of_the_model_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_error(self, layout, span):
        raise RuntimeError("no such slot")

    monkeypatch.setattr(Contiguous, "place", raise_error)
    outcome = attempt("cached = whole", trials(build(ROPE), 12)[""])
    assert outcome.note == "RuntimeError: no such slot" and not within_tolerance(outcome, torch.float64)


def test_verify_finds_a_tensor_that_is_not_saved_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    original = weights.load

    def load_with_an_error(*arguments):
        model = original(*arguments)
        next(model.parameters()).data[0, 0] += 1e-6
        return model

    monkeypatch.setattr(weights, "load", load_with_an_error)
    assert broken(ROPE) == {"saved and loaded = original"}


def test_verify_finds_an_evicting_cache_that_keeps_too_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamingRing, "place", RingBuffer.place)  # the slack of the ring is read too
    assert breaks(ROPE, "evicting cache = dense mask")


def test_verify_finds_a_first_token_that_is_not_rotated_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope.Rope, "shift", lambda self, k, offsets: k if k.shape[2] > 1 else k.flip(-1))
    assert breaks(ROPE, "evicting cache = dense mask")


@pytest.mark.parametrize("fault", [
    lambda self, past, received, last: top(past, past.double(), past > last, self.budget - 1),  # by age alone
    lambda self, past, received, last: past >= 0,  # keeps all
])  # fmt: skip
def test_verify_finds_keys_that_are_not_chosen_by_their_scores(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptWindow, "keep", fault)
    assert breaks(ROPE, "evicting cache = dense mask")


def test_verify_finds_codes_that_are_rounded_down(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Integer.encode
    monkeypatch.setattr(Integer, "encode", lambda self, values, grid: (original(self, values, grid) - 1).clamp_min(0))
    assert breaks(ROPE, "quantized cache within its bound")


def test_verify_finds_newest_tokens_that_depend_on_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    def newest_of_the_chunk(decoded: TokenLayout, newest: TokenLayout, recent: int) -> TokenLayout:
        return join_keys(decoded, newest, min(recent, decoded.positions.shape[1]))

    monkeypatch.setattr(stores_recent, "join_keys", newest_of_the_chunk)
    assert breaks(ROPE, "quantized cache within its bound")
