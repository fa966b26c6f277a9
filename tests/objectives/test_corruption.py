"""Corrupted texts: every corruption is undone from the source and the target, on known seeds."""

import math
import re

import numpy as np
import pytest

from regard.data.loader import Loader
from regard.data.packing import Item
from regard.data.sources.base import open_collection
from regard.kernels.attention.mask import PrefixLM
from regard.models.encoder import Encoder
from regard.models.heads import Classification, MaskedLM
from regard.models.presets import bert, transformer_2017
from regard.models.stack import Repeat
from regard.objectives.base import Objective
from regard.objectives.bert_pretraining import FOLLOWS, RANDOM, BertPretraining
from regard.objectives.denoising import Denoising, infill_spans, infilled_spans, sentence_permutation
from regard.objectives.masked import MaskedTokens
from regard.objectives.prefix_lm import PrefixLanguageModel
from regard.objectives.span_corruption import SpanCorruption, random_partition, sentinel
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.input import Tokens
from regard.spec import SpecError
from regard.text.borders import split_sentences
from regard.text.tokenizer import Tokenizer
from regard.text.train import byte

TEXT = " ".join(f"Sentence {n} names the {['cat', 'dog', 'owl'][n % 3]}." for n in range(40))


def items_of(objective: Objective, tokenizer: Tokenizer, length: int, seed: int, text: str = TEXT) -> list[Item]:
    columns = objective.tokenize({"text": text}, tokenizer)
    return objective.sample(columns, tokenizer, length, np.random.default_rng(seed))


def prepared(objective: Objective) -> Tokenizer:
    tokenizer = byte(objective.special_tokens)
    objective.prepare_tokenizer(tokenizer)
    return tokenizer


def insert_spans(source: list[int], target: list[int], sentinels: set[int]) -> list[int]:
    """The original ids: every sentinel of the source is replaced by the tokens that follow it in the target."""
    spans: dict[int, list[int]] = {}
    for id in target:
        if id in sentinels:
            spans[id] = current = []
        else:
            current.append(id)
    return [part for id in source for part in (spans[id] if id in sentinels else [id])]


@pytest.mark.ledger("tr.t5")
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("length", [8, 33, 64, 300])
def test_removed_spans_reconstruct_the_text(length: int, seed: int) -> None:
    objective = SpanCorruption()
    tokenizer = prepared(objective)
    sentinels = {tokenizer.core.token_to_id(sentinel(n)) for n in range(100)}
    items = items_of(objective, tokenizer, length, seed)
    restored: list[int] = []
    for item in items:
        source, target = item["source"].tolist(), item["targets"].tolist()
        assert len(source) <= length and len(target) <= length and target[-1] == tokenizer.eos
        assert item["tokens"].tolist() == [tokenizer.pad, *target[:-1]]  # without bos, pad starts the output
        found = [id for id in source if id in sentinels]
        assert found == [id for id in target if id in sentinels] == sorted(found) and len(set(found)) == len(found)
        restored += insert_spans(source, target[:-1], sentinels)
    assert restored == tokenizer.encode(TEXT)[: len(restored)] and len(restored) >= len(tokenizer.encode(TEXT)) - 1


def test_rates_of_span_corruption_are_exact() -> None:
    objective = SpanCorruption()
    tokenizer = prepared(objective)
    size = objective.slice_size(512, 0)
    assert size == 569  # 85 tokens are removed in 28 spans: 512 tokens of the source, 114 of the target
    assert objective.counts(size) == (85, 28)
    (item,) = items_of(objective, tokenizer, 512, 0, TEXT[:size])
    assert len(item["source"]) == 512 and len(item["targets"]) == 85 + 28 + 1


def test_every_partition_is_equally_likely() -> None:
    rng = np.random.default_rng(0)
    draws = [tuple(random_partition(5, 3, rng).tolist()) for _ in range(6000)]
    counts = {partition: draws.count(partition) for partition in set(draws)}
    assert len(counts) == math.comb(4, 2)
    assert all(abs(count - 1000) < 4 * math.sqrt(1000) for count in counts.values())


@pytest.mark.ledger("tr.denoise")
@pytest.mark.parametrize("seed", range(8))
def test_infilled_spans_are_undone(seed: int) -> None:
    ids, mask, rng = np.arange(100, 160), 7, np.random.default_rng(seed)
    starts, lengths = infilled_spans(len(ids), 0.3, 3.0, rng)
    corrupted = infill_spans(ids, mask, starts, lengths).tolist()
    assert sum(lengths) == 18 and corrupted.count(mask) == len(lengths) and len(corrupted) == 42 + len(lengths)
    kept, spans, next_id = [id for id in corrupted if id != mask], iter(lengths), 100
    assert kept == sorted(kept)
    for id in corrupted:  # every mask stands for as many missing ids as its span is long
        if id == mask:
            next_id += next(spans)
        else:
            assert id == next_id
            next_id += 1
    assert next_id == 160


def test_spans_of_infilling_have_poisson_lengths() -> None:
    rng = np.random.default_rng(0)
    lengths = [length for _ in range(200) for length in infilled_spans(1000, 0.3, 3.0, rng)[1][:-1]]
    assert abs(np.mean(lengths) - 3) < 0.05 and abs(np.var(lengths) - 3) < 0.1
    assert abs(lengths.count(0) / len(lengths) - math.exp(-3)) < 0.01


@pytest.mark.parametrize("seed", range(4))
def test_permuted_sentences_are_undone(seed: int) -> None:
    sentences = np.repeat(np.arange(1, 9), [3, 1, 4, 1, 5, 9, 2, 6])
    order = sentence_permutation(sentences, np.random.default_rng(seed))
    permuted = sentences[order]
    borders = [permuted[0], *permuted[1:][np.diff(permuted) != 0]]
    assert sorted(borders) == list(range(1, 9)) and borders != sorted(borders)
    assert (np.arange(len(order))[order][np.argsort(order)] == np.arange(len(order))).all()


def only(**shares: float) -> Denoising:
    return Denoising(**{"permute": 0.0, "infill": 0.0} | shares)


@pytest.mark.ledger("tr.denoise")
@pytest.mark.parametrize("seed", range(3))
def test_each_corruption_alone(seed: int) -> None:
    tokenizer = prepared(Denoising())
    mask, ids = tokenizer.core.token_to_id("[MASK]"), tokenizer.encode(TEXT[:400])

    def source_of(objective: Denoising) -> list[int]:
        (item,) = items_of(objective, tokenizer, 401, seed, TEXT[:400])
        assert item["targets"].tolist() == [*ids, tokenizer.eos]
        return item["source"].tolist()

    masked = source_of(only(mask=0.3))
    assert all(a in (b, mask) for a, b in zip(masked, ids, strict=True)) and 80 < masked.count(mask) < 160
    deleted, remaining = source_of(only(delete=0.3)), iter(ids)
    assert all(id in remaining for id in deleted) and 240 < len(deleted) < 320  # a subsequence
    rotated = source_of(only(rotate=1.0))
    assert any(rotated[-n:] + rotated[:-n] == ids for n in range(1, 400))
    permuted = tokenizer.decode(source_of(only(permute=1.0)))
    found, sentences = (re.findall(r"Sentence \d+ names the \w+\.", text) for text in (permuted, TEXT[:400]))
    assert sorted(found) == sorted(sentences) and found != sentences and len(sentences) == 15
    assert sorted(source_of(only(permute=1.0))) == sorted(ids)


def test_denoising_slices_fit_and_cover_the_text() -> None:
    objective = Denoising(rotate=0.5, delete=0.1, mask=0.1)
    tokenizer = prepared(objective)
    for seed in range(20):
        items = items_of(objective, tokenizer, 24, seed)
        assert all(len(item["source"]) <= 24 and len(item["targets"]) <= 24 for item in items)
        assert [id for item in items for id in item["targets"][:-1].tolist()] == tokenizer.encode(TEXT)


@pytest.mark.ledger("tr.nsp")
def test_pairs_follow_or_come_from_another_document() -> None:
    objective = BertPretraining(MaskedTokens(whole_words=True))
    tokenizer = prepared(objective)
    cls, sep = (tokenizer.core.token_to_id(token) for token in ("[CLS]", "[SEP]"))
    other = " ".join(f"Other words {n}." for n in range(30))
    columns = dict(objective.tokenize({"text": TEXT}, tokenizer))
    columns |= {
        f"other_{n}": c for n, c in objective.tokenize({"sentences": split_sentences(other)}, tokenizer).items()
    }
    labels = []
    for seed in range(20):
        for item in objective.sample(columns, tokenizer, 128, np.random.default_rng(seed)):
            ids, types = item["targets"].tolist(), item["types"]
            assert len(ids) <= 128 and ids[0] == cls and ids.count(sep) == 2 and ids[-1] == sep
            middle = ids.index(sep)
            assert not types[: middle + 1].any() and types[middle + 1 :].all()
            first, second = tokenizer.decode(ids[1:middle]), tokenizer.decode(ids[middle + 1 : -1])
            if not first.endswith("."):  # of the last sentence alone
                assert item["label"] == RANDOM or TEXT.endswith(first + second)
                continue
            assert first.startswith("Sentence")
            labels.append(int(item["label"]))
            if labels[-1] == RANDOM:
                assert second.startswith("Other words")
            else:
                number = int(first.split("Sentence ")[-1].split()[0])
                assert second.startswith(f"Sentence {number + 1} ")
            chosen = item["weights"] == 1
            assert chosen.any() and not chosen[[0, middle, -1]].any()
    assert set(labels) == {FOLLOWS, RANDOM}


@pytest.mark.parametrize("sentences", [1, 2, 3, 9])
@pytest.mark.parametrize("share", [0.5, 0.2])
def test_the_share_of_random_pairs_does_not_depend_on_the_number_of_sentences(sentences: int, share: float) -> None:
    objective = BertPretraining(random=share)
    tokenizer, rng = prepared(objective), np.random.default_rng(0)
    columns = objective.tokenize({"sentences": [f"Sentence {n}." for n in range(sentences)]}, tokenizer)
    columns = {**columns, **{f"other_{name}": array for name, array in columns.items()}}
    labels = [int(item["label"]) for _ in range(300) for item in objective.sample(columns, tokenizer, 40, rng)]
    deviation = math.sqrt(share * (1 - share) / len(labels))
    assert abs(np.mean(labels) - share) < 4 * deviation


def test_the_prefix_has_no_loss_and_the_split_is_random() -> None:
    objective = PrefixLanguageModel(5)
    tokenizer, ids = byte(), [*byte().encode(TEXT), byte().eos]
    starts = set()
    for seed in range(30):
        items = items_of(objective, tokenizer, 32, seed)
        first = items[0]["tokens"].tolist()
        starts.add(next(n for n in range(len(ids)) if ids[n : n + 32] == first))
        for item in items:
            assert item["weights"].tolist() == [0.0] * 4 + [1.0] * (len(item["weights"]) - 4)
            assert item["tokens"][1:].tolist() == item["targets"][:-1].tolist()
    assert len(starts) > 10


CAUSAL = transformer_2017(50, 8, 2, 8, 1).target
SMALL_BERT = {"vocab": 50, "width": 8, "heads": 2, "hidden": 8, "layers": 1}


def prefix_model(prefix: int) -> Encoder:
    block = Block((Sublayer(Attention(2, mask=PrefixLM(prefix))),))
    return Encoder(Tokens(50), 8, (Repeat((block,)),), head=MaskedLM())


@pytest.mark.parametrize(
    ("objective", "model", "message"),
    [
        (PrefixLanguageModel(3), CAUSAL, "an encoder with a masked_lm head .*, and this model is a decoder"),
        (
            PrefixLanguageModel(3),
            bert(**SMALL_BERT, head=MaskedLM()),
            "attentions have the mask prefix_lm, and this model is an encoder of tokens with a masked_lm head",
        ),
        (
            PrefixLanguageModel(3),
            prefix_model(2),
            r"has prefix=3, and the mask of an attention is \[PrefixLM\(prefix=2",
        ),
        (SpanCorruption(), CAUSAL, "trains an encoder_decoder or seq2seq .*, and this model is a decoder"),
        (Denoising(), bert(**SMALL_BERT), "and this model is an encoder of tokens without a head"),
        (BertPretraining(), bert(**SMALL_BERT, head=Classification(2)), "trains an encoder with a pretraining head"),
    ],
)
def test_other_models_are_refused(objective: Objective, model, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        objective.check_model(model)


@pytest.mark.parametrize("objective", [SpanCorruption(), Denoising(), BertPretraining()], ids=lambda o: o.kind)
def test_missing_tokens_and_empty_examples_are_refused(objective: Objective) -> None:
    with pytest.raises(ValueError, match="no sentinels|no mask token"):
        objective.prepare_tokenizer(byte())
    with pytest.raises(ValueError, match="nothing to train on: {'text': ''}"):
        objective.tokenize({"text": ""}, prepared(objective))
    with pytest.raises(ValueError, match="needs examples with text; this one has label"):
        objective.tokenize({"label": 1}, prepared(objective))


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (SpanCorruption, {"density": 0.0}),
        (SpanCorruption, {"span": 0.5}),
        (SpanCorruption, {"label_smoothing": 1.0}),
        (Denoising, {"infill": 1.5}),
        (Denoising, {"infill": 0.0, "permute": 0.0}),
        (BertPretraining, {"random": 1.0}),
        (PrefixLanguageModel, {"prefix": 0}),
    ],
)
def test_wrong_options_are_refused(cls: type[Objective], options: dict[str, float]) -> None:
    with pytest.raises(SpecError):
        cls(**options)


@pytest.mark.parametrize("objective", [SpanCorruption(), PrefixLanguageModel(4)], ids=lambda o: o.kind)
def test_texts_too_short_for_the_objective_are_left_out(objective: Objective) -> None:
    """The last lines of a file may be that short."""
    tokenizer = byte(objective.special_tokens)
    assert items_of(objective, tokenizer, 32, 0, "a") == []
    assert len(items_of(objective, tokenizer, 32, 0, "a few words")) == 1


OBJECTIVES = [
    MaskedTokens(whole_words=True), BertPretraining(MaskedTokens(whole_words=True)), SpanCorruption(),
    Denoising(mask=0.2), PrefixLanguageModel(3),
]  # fmt: skip


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: o.kind)
def test_items_of_stored_columns_equal_those_of_new_ones(objective: Objective) -> None:
    """Prepared columns are read-only and have the smallest dtype that holds their values."""
    tokenizer = prepared(objective)
    text = ". ".join("abc" for _ in range(255))
    columns = dict(objective.tokenize({"text": text}, tokenizer))
    if objective.needs_other:
        columns |= {f"other_{name}": column for name, column in columns.items()}
    stored = {name: column.astype(np.min_scalar_type(column.max())) for name, column in columns.items()}
    for column in stored.values():
        column.flags.writeable = False
    items = [objective.sample(c, tokenizer, 100, np.random.default_rng(0)) for c in (columns, stored)]
    for new, old in zip(*items, strict=True):
        assert all((new[name] == old[name]).all() for name in new)
    assert len(items[0]) > 3 and min(column.dtype.itemsize for column in stored.values()) <= 2


def test_too_few_sentinels_are_refused() -> None:
    objective = SpanCorruption(sentinels=2)
    with pytest.raises(ValueError, match="has only 2 sentinels; lower data.length"):
        items_of(objective, prepared(objective), 200, 0)


def test_one_document_is_refused_if_pairs_need_another_one() -> None:
    """The other segment would come from the same document, and its label would be wrong."""
    objective = BertPretraining()
    examples = open_collection("one", [{"text": "One. Two."}], 0, hold_out=False).train
    with pytest.raises(ValueError, match="one, train is one example, and this objective also needs another one"):
        Loader(examples, objective, prepared(objective), rows=1, length=32)
