"""Masked language modelling: the rates of masking, whole words, and a loss over the masked tokens only."""

import math

import numpy as np
import pytest
import tokenizers as tokenizers_library
import torch
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from regard.data.batch import Batch
from regard.data.loader import Loader
from regard.data.packing import Item, pack
from regard.data.sources.files import Pydoc
from regard.data.sources.world import WorldStories
from regard.layout import TokenLayout
from regard.models import outputs
from regard.models.heads import Classification, MaskedLM, PreTraining
from regard.models.presets import BERT_DENSE, bert
from regard.objectives.bert_pretraining import bert_pretraining
from regard.objectives.masked import MaskedTokens, masked
from regard.spec import SpecError
from regard.text import train as tokenizers
from regard.text.tokenizer import Tokenizer
from regard.training.optimizer import AdamW
from regard.training.step import take_step

TOKENIZER = tokenizers.byte(MaskedTokens().special_tokens)
CLS, SEP, MASK = (TOKENIZER.core.token_to_id(token) for token in ("[CLS]", "[SEP]", "[MASK]"))
VOCAB = TOKENIZER.vocab_size
SMALL = {"vocab": VOCAB, "width": 24, "heads": 4, "hidden": 40, "layers": 2, "length": 64, "dropout": 0.0}


def sample(text: str, objective: MaskedTokens, length: int = 64, seed: int = 0) -> list[Item]:
    rng = np.random.default_rng(seed)
    return objective.sample(objective.tokenize({"text": text}, TOKENIZER), TOKENIZER, length, rng)


def is_near_mean(count: int, total: int, rate: float) -> bool:
    """Whether a binomial count is within four standard deviations of its mean."""
    return abs(count - total * rate) < 4 * math.sqrt(total * rate * (1 - rate))


@pytest.mark.ledger("tr.mlm")
def test_tokens_are_masked_replaced_and_kept_at_their_rates() -> None:
    """12 % of all tokens are masked, 1.5 % replaced, 1.5 % selected and kept; never special tokens."""
    text = "".join(chr(97 + n % 26) for n in range(100_000))
    (item,) = sample(text, MaskedTokens(), length=len(text) + 2)
    tokens, targets, selected = item["tokens"], item["targets"], item["weights"] == 1
    assert targets.tolist() == [CLS, *TOKENIZER.encode(text), SEP]
    assert (tokens[~selected] == targets[~selected]).all() and not selected[[0, -1]].any()
    masked_out, kept = selected & (tokens == MASK), selected & (tokens == targets)
    replaced = selected & ~masked_out & ~kept
    assert is_near_mean(int(selected.sum()), len(text), 0.15)
    assert is_near_mean(int(masked_out.sum()), len(text), 0.12)
    assert is_near_mean(int(kept.sum()), len(text), 0.015 + 0.015 / 256)  # a random token may be the token itself
    assert set(tokens[replaced].tolist()).isdisjoint(TOKENIZER.all_special_ids)
    assert len(set(tokens[replaced].tolist())) > 250


@pytest.mark.ledger("tr.mlm.example")
def test_two_of_six_tokens_are_a_third_although_the_rate_is_15_percent() -> None:
    """An illustration: at a rate of 15 % two of six tokens are masked in a few samples only."""
    words = ["we", "hear", "owls", "and", "foxes", "."]
    core = tokenizers_library.Tokenizer(WordLevel({word: id for id, word in enumerate(words)}))
    core.pre_tokenizer = WhitespaceSplit()
    core.add_special_tokens([*tokenizers.SPECIAL_TOKENS, *MaskedTokens().special_tokens])
    tokenizer = tokenizers.with_special_tokens(core, MaskedTokens().special_tokens)
    objective = MaskedTokens(mask=1.0, random=0.0)
    columns = objective.tokenize({"text": " ".join(words)}, tokenizer)
    assert columns["ids"].tolist() == list(range(6)) and objective.share == MaskedTokens().share == 0.15
    shown, counts = [], []
    for seed in range(2000):
        (item,) = objective.sample(columns, tokenizer, 8, np.random.default_rng(seed))
        counts.append(int(item["weights"].sum()))
        shown.append(" ".join(words[id] if id < 6 else "[MASK]" for id in item["tokens"][1:-1]))
    example = shown.index("we [MASK] owls and [MASK] .")
    assert counts[example] / 6 == pytest.approx(0.33, abs=0.005)
    # Two of six: 15 · 0.15² · 0.85⁴ = 17.6 %. None of six becomes one of six, so that every sentence is trained on.
    assert is_near_mean(counts.count(2), 2000, math.comb(6, 2) * 0.15**2 * 0.85**4)
    assert is_near_mean(counts.count(1), 2000, 6 * 0.15 * 0.85**5 + 0.85**6)


def test_other_rates() -> None:
    text = "abcdefgh" * 1000
    (item,) = sample(text, MaskedTokens(share=0.4, mask=1.0, random=0.0), length=len(text) + 2)
    assert is_near_mean(int(item["weights"].sum()), len(text), 0.4)
    assert (item["tokens"][item["weights"] == 1] == MASK).all()
    for wrong in ({"share": 0.0}, {"share": 1.5}, {"mask": 0.8, "random": 0.3}, {"mask": -0.1}):
        with pytest.raises(SpecError, match="masked_lm"):
            MaskedTokens(**wrong)


@pytest.mark.ledger("tr.mlm")
def test_whole_words_are_chosen_with_all_their_tokens() -> None:
    words = [f"{'wxyz'[n % 4] * (n % 7 + 1)}{n}" for n in range(2000)]
    text = " ".join(words)
    objective = MaskedTokens(mask=1.0, random=0.0, whole_words=True)
    (item,) = sample(text, objective, length=len(text) + 2)
    shown = item["weights"][1:-1]  # one token per byte
    start, chosen = 0, 0
    for number, word in enumerate(words):
        weights = shown[start : start + len(word) + (number > 0)]
        assert len(set(weights.tolist())) == 1, word
        chosen += int(weights[0])
        start += len(weights)
    assert start == len(shown) and is_near_mean(chosen, len(words), 0.15)


def test_documents_are_sliced_and_every_slice_has_a_target() -> None:
    text = "a short document of some bytes"
    items = sample(text, MaskedTokens(share=0.001), length=12)
    assert [len(item["tokens"]) for item in items] == [12, 12, 12]
    joined = [id for item in items for id in item["targets"].tolist()[1:-1]]
    assert joined == TOKENIZER.encode(text)
    assert all(item["targets"][0] == CLS and item["targets"][-1] == SEP for item in items)
    assert all(item["weights"].sum() >= 1 for item in items)
    with pytest.raises(ValueError, match="length=2 has no space"):
        sample(text, MaskedTokens(), length=2)


def test_masks_differ_between_epochs_and_are_restored() -> None:
    source, objective = Pydoc().open().train, MaskedTokens(whole_words=True)

    def loader() -> Loader:
        return Loader(source, objective, TOKENIZER, rows=2, length=64)

    first = loader()
    count = source.count
    assert count is not None
    documents = {tuple(source.example(index)["text"]): index for index in range(count)}
    again = documents[tuple(source.example(count)["text"])]  # in another epoch
    items = [first._items(index)[0] for index in (again, count, count)]
    assert (items[0]["targets"] == items[1]["targets"]).all() and (items[0]["tokens"] != items[1]["tokens"]).any()
    assert (items[1]["tokens"] == items[2]["tokens"]).all()
    next(first)
    state, second = first.state_dict(), loader()
    second.load_state_dict(state)
    assert torch.equal(next(first).tokens, next(second).tokens)


def test_missing_tokens_and_other_models_are_refused() -> None:
    with pytest.raises(ValueError, match="no mask token"):
        MaskedTokens().prepare_tokenizer(tokenizers.byte())
    with pytest.raises(ValueError, match="nothing to train on: {'text': ''}"):
        sample("", MaskedTokens())
    with pytest.raises(ValueError, match="needs examples with text; this one has label"):
        MaskedTokens().tokenize({"label": 1}, TOKENIZER)
    with pytest.raises(SpecError, match="masked_lm head"):
        MaskedTokens().check_model(bert(**SMALL, head=Classification(2)))


def test_the_loss_is_over_the_selected_tokens() -> None:
    model = bert(**SMALL, head=MaskedLM(BERT_DENSE)).build(0).double().eval()
    items = [sample("one document", MaskedTokens(share=0.4)), sample("short", MaskedTokens(share=0.4))]
    batch = pack(items, 16)
    loss, count, metrics = masked(model, batch)
    log_p = model(batch.tokens, TokenLayout(batch.positions, valid=batch.segments >= 0)).log_softmax(-1)
    indices = [(row, t) for row in range(2) for t in range(16) if batch.weights[row, t] == 1]
    expected = -sum(log_p[row, t, batch.targets[row, t]] for row, t in indices)
    correct = sum(log_p[row, t].argmax() == batch.targets[row, t] for row, t in indices)
    assert count == len(indices) > 3
    assert abs(loss - expected) < 1e-10
    assert metrics["accuracy"] == correct


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("pairs", [False, True])
def test_only_the_logits_of_selected_tokens_are_computed(monkeypatch, tied: bool, pairs: bool) -> None:
    """Loss, accuracy and gradients are those of all logits, float64 to 1e-12."""
    words = MaskedLM(BERT_DENSE, tied=tied)
    model = bert(**SMALL, head=PreTraining(words, Classification(2)) if pairs else words).build(0).double()
    items = [sample("one document", MaskedTokens(share=0.3)), sample("short", MaskedTokens(share=0.3))]
    batch = Batch(**pack(items, 16), types=torch.zeros(2, 16, dtype=torch.long))
    if pairs:
        batch = Batch(**batch, labels=torch.tensor([0, 1]), pair_weights=torch.ones(2, dtype=torch.float64))
    objective = bert_pretraining if pairs else masked
    rows = []
    kernel = outputs.linear_cross_entropy
    monkeypatch.setattr(
        outputs,
        "linear_cross_entropy",
        lambda x, *args, **options: (rows.append(len(x)), kernel(x, *args, **options))[1],
    )
    results = {}
    for name in ("selected", "all"):
        if name == "all":  # a subclass counts as an adapted layer, whose logits are all computed
            vocab = (model.head.words if pairs else model.head).vocab
            vocab.__class__ = type("Adapted", (torch.nn.Linear,), {})
        loss, count, metrics = objective(model, batch)
        loss.backward()
        results[name] = {"loss": loss.detach(), "count": count, **metrics}
        results[name] |= {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
    assert rows == [int(batch.weights.sum())] and rows[0] < 10
    assert results["selected"].keys() == results["all"].keys()
    for name, value in results["all"].items():
        torch.testing.assert_close(results["selected"][name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("packed", [True, False])
def test_an_encoder_learns_to_predict_masked_tokens(packed: bool) -> None:
    """The data are stories of the simulated world, encoded as bytes."""
    objective = MaskedTokens(packed=packed)
    loader = iter(Loader(WorldStories().open().train, objective, TOKENIZER, rows=8, length=64))
    model = bert(VOCAB, 48, 4, 96, 1, 64, MaskedLM(BERT_DENSE), dropout=0.0).build(0)
    optimizer = AdamW().build(model, lr=1e-2)
    losses = [take_step(model, objective, next(loader), optimizer, clip=1.0)["loss"] for _ in range(30)]
    assert losses[0] > 5
    assert sum(losses[-5:]) / 5 < 3.5


def test_special_tokens_are_saved_with_the_tokenizer(tmp_path) -> None:
    TOKENIZER.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    MaskedTokens().prepare_tokenizer(loaded)
    assert loaded.encode_with_special_tokens("a", "b") == TOKENIZER.encode_with_special_tokens("a", "b")
    assert loaded.prefix_ids == (CLS,) and loaded.suffix_ids == (SEP,)
