"""The loader resumes exactly between any two batches, does not depend on the number of ranks, and packs tightly."""

import json

import pytest
import torch

from regard.data.loader import Loader
from regard.data.sources.base import Shuffled
from regard.data.sources.mixture import Mixture, distinct_end
from regard.data.sources.world import WorldStories
from regard.objectives.classification import SequenceClassification
from regard.objectives.embeddings import SentenceEmbeddings
from regard.objectives.next_token import NextToken
from regard.objectives.span_corruption import SpanCorruption
from regard.text.train import byte

TOKENIZER = byte()


def world(level=1):
    return WorldStories(level=level).open().train


def loader(source=None, rows=2, length=512, **ranks):
    return Loader(source or world(), NextToken(), TOKENIZER, rows, length, **ranks)


def take(source, count):
    return [next(source) for _ in range(count)]


def equal(left, right):
    return all(torch.equal(left[name], right[name]) for name in left.fields)


def mixed_source():
    texts = ["short", "a little longer than that", "x" * 700, "y" * 90, "", "z"]
    return Shuffled("mixed", [{"text": text} for text in texts], "fingerprint")


@pytest.mark.parametrize("source", [world(), mixed_source()], ids=["world", "mixed"])
@pytest.mark.parametrize("batches", [0, 1, 3, 6])
def test_resume_is_bit_identical(source, batches):
    uninterrupted = loader(source, length=64)
    take(uninterrupted, batches)
    state = json.loads(json.dumps(uninterrupted.state_dict()))
    expected = take(uninterrupted, 4)
    resumed = loader(source, length=64)
    take(resumed, 2)
    resumed.load_state_dict(state)
    assert all(equal(left, right) for left, right in zip(expected, take(resumed, 4), strict=True))


def test_the_rows_of_all_ranks_are_the_global_batch():
    whole = take(loader(rows=4), 3)
    parts = [take(loader(rows=4, rank=rank, ranks=2), 3) for rank in range(2)]
    for step in range(3):
        for name in whole[step].fields:
            assert torch.equal(whole[step][name], torch.cat([part[step][name] for part in parts]))


def test_batches_hold_the_pairs_of_all_documents_read_except_pending_ones():
    source = mixed_source()
    packed_loader = loader(source, rows=1, length=64)
    pairs = sum(int((batch.segments >= 0).sum()) for batch in take(packed_loader, 200))
    epoch = sum(len(TOKENIZER.encode(example["text"])) for example in source.collection)
    # pairs of all documents read so far, including those that are still pending
    pairs_read = packed_loader._next_example / source.count * epoch
    assert abs(pairs_read - pairs) < 3 * epoch


def test_rows_have_little_padding():
    batches = take(loader(rows=8, length=2048), 10)
    assert sum(float((batch.segments >= 0).float().mean()) for batch in batches) / 10 > 0.93


def test_a_source_of_single_tokens_is_refused():
    empty = Shuffled("empty", [{"text": "a", "end": False}, {"text": ""}], "fingerprint")
    with pytest.raises(ValueError, match="fewer than two tokens"):
        next(loader(empty))


def test_the_state_of_another_source_or_length_is_refused():
    state = loader().state_dict()
    with pytest.raises(ValueError, match="length=512"):
        loader(length=128).load_state_dict(state)
    with pytest.raises(ValueError, match="level 1"):
        loader(world(level=2)).load_state_dict(state)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rows": 3, "ranks": 2}, "rows=3 is not divisible by ranks=2"),
        ({"rank": 2, "ranks": 2}, "rank=2 must be from 0 to 1, because ranks=2"),
        ({"rows": 0}, "rows=0 and length=.* must be at least 1"),
    ],
)
def test_invalid_rows_and_ranks_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        loader(**wrong)


def test_changed_data_are_refused():
    state = loader(mixed_source()).state_dict()
    changed = Shuffled("mixed", [{"text": "other"}], "another fingerprint")
    with pytest.raises(ValueError, match="the data of mixed changed after the checkpoint was saved"):
        loader(changed).load_state_dict(state)


def test_an_epoch_has_as_many_rows_as_items():
    """A long document is sliced into several items, each a row."""
    objective, document = SpanCorruption(sentinels=8), {"text": "many words " * 40}
    source = Shuffled("documents", [document] * 3, "0")
    loader = Loader(source, objective, byte(objective.special_tokens), rows=2, length=32)
    per_document = len(loader._items(0))
    assert per_document > 9 and loader.epoch_size() == 3 * per_document


def labelled(count):
    return Shuffled("labelled", [{"text": f"text {n}", "label": n % 2} for n in range(count)], "fingerprint")


def labels_loader(count, rows=8, **ranks):
    return Loader(labelled(count), SequenceClassification(num_labels=2), TOKENIZER, rows, 64, **ranks)


def texts_of(batches):
    return [
        TOKENIZER.decode(ids[mask].tolist())
        for batch in batches
        for ids, mask in zip(batch.tokens, batch.valid, strict=True)
    ]


@pytest.mark.parametrize("count, sizes", [(4, [4]), (8, [8]), (20, [8, 8, 4]), (100, [8] * 5)])
def test_without_repetition_each_example_occurs_at_most_once(count, sizes):
    batches = list(labels_loader(count).without_repetition(5))
    assert [batch.size for batch in batches] == sizes
    assert len(set(texts_of(batches))) == sum(sizes)


def test_ranks_without_repetition_get_the_same_number_of_rows():
    parts = [list(labels_loader(13, rank=rank, ranks=2).without_repetition(5)) for rank in range(2)]
    assert [[batch.size for batch in part] for part in parts] == [[4, 2], [4, 2]]
    assert len({*texts_of(parts[0]), *texts_of(parts[1])}) == 12


@pytest.mark.parametrize("count, sizes", [(1, []), (3, [3]), (11, [4, 4])])
def test_rows_that_are_compared_come_in_batches_of_one_size(count, sizes):
    pairs = Shuffled("pairs", [{"anchor": f"a {n}", "positive": f"b {n}"} for n in range(count)], "fingerprint")
    loader = Loader(pairs, SentenceEmbeddings(), TOKENIZER, 4, 64)
    assert [batch.size for batch in loader.without_repetition(5)] == sizes


def test_packed_rows_without_repetition_hold_every_document_once():
    texts = [f"document {n} " + "x" * n for n in range(30)]
    source = Shuffled("texts", [{"text": text} for text in texts], "fingerprint")
    batches = list(loader(source, rows=4, length=64).without_repetition(50))
    weights = sum(float(batch.weights.sum()) for batch in batches)
    expected = sum(len(NextToken().tokenize({"text": text}, TOKENIZER)["ids"]) - 1 for text in texts)
    assert weights == expected and all(batch.size == 4 for batch in batches[:-1])


@pytest.mark.parametrize("counts, expected", [((3, 1000), 1003), ((700, 700), 1400), ((1, None), None)])
def test_a_mixture_without_repetition_has_every_example_of_its_finite_sources_once(counts, expected):
    def source(name, count):
        return world() if count is None else Shuffled(name, [{"text": f"{name}{n}"} for n in range(count)], name)

    mixture = Mixture(tuple(source(name, count) for name, count in zip("ab", counts, strict=True)), (1.0, 2.0))
    pieces = loader(mixture, rows=1, length=4096)
    seen = 0
    for _ in range(60 if expected is None else 10_000):
        if not pieces._fill(1, repeat=False):
            break
        pieces._pending.clear()
        seen += 1
    assert seen == (60 if expected is None else expected)
    assert distinct_end(Mixture((world(), mixture), (1.0, 1.0))) is None
