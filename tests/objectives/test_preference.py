"""Preference pairs: which tokens count, identities of the losses, and the reference."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard.data.batch import Batch
from regard.data.loader import Loader
from regard.data.sources.base import open_collection
from regard.kernels.linear_logprobs import linear_logprobs
from regard.objectives.kto import KTO
from regard.objectives.preference import DPO, SimPO
from regard.objectives.reward import Reward
from regard.objectives.sequence_logprobs import score_tokens, sequence_logprobs, sum_segments
from regard.text.train import byte
from regard.training.reference import ReferenceTable, reference_logprobs, row_digests

TOKENIZER = byte()
PAIR = {"prompt": "is it so?", "chosen": " it is.", "rejected": " no."}
MESSAGES = [{"role": "user", "content": "is it so?"}]


def decoder(vocab: int = TOKENIZER.vocab_size) -> torch.nn.Module:
    body = regard.Attention(2, position=regard.Rope())
    layer = regard.Block((regard.Sublayer(body), regard.Sublayer(regard.SwiGLU(24))))
    return regard.Decoder(vocab, 16, (regard.Repeat((layer,)),)).build(seed=0).double()


def batch_of(*examples: dict[str, Any], objective: Any = None, length: int = 40) -> Batch:
    objective = objective or DPO()
    rows = [[objective.tokenize(example, TOKENIZER)] for example in examples]
    return objective.collate(rows, TOKENIZER, length)


def counted_text(batch: Batch, row: int, segment: int) -> str:
    chosen = (batch.segments[row] == segment) & (batch.weights[row] > 0)
    return TOKENIZER.decode(batch.targets[row][chosen].tolist(), special=True)


@pytest.mark.parametrize(
    "example",
    [
        PAIR,
        {"chosen": "is it so? it is.", "rejected": "is it so? no."},
        {"prompt": MESSAGES, "chosen": "it is.", "rejected": "no."},
        {
            "prompt": MESSAGES,
            "chosen": [{"role": "assistant", "content": "it is."}],
            "rejected": [{"role": "assistant", "content": "no."}],
        },
        {
            "chosen": [*MESSAGES, {"role": "assistant", "content": "it is."}],
            "rejected": [*MESSAGES, {"role": "assistant", "content": "no."}],
        },
        {
            "prompt": "is it so?",
            "chosen": [*MESSAGES, {"role": "assistant", "content": "it is."}],
            "rejected": [*MESSAGES, {"role": "assistant", "content": "no."}],
        },
    ],
    ids=["strings", "common start", "messages", "answers as messages", "conversations", "a string and conversations"],
)
def test_only_the_completions_count(example: dict[str, Any]) -> None:
    batch = batch_of(example)
    assert counted_text(batch, 0, 0) == " it is.<|end|>"
    assert counted_text(batch, 0, 1) == " no.<|end|>"
    assert batch.positions[0][batch.segments[0] == 1][0] == 0


def test_of_several_messages_those_of_the_assistant_count() -> None:
    again = {"role": "user", "content": "sure?"}
    first, second = ({"role": "assistant", "content": text} for text in ("it is.", "yes."))
    example = {"prompt": MESSAGES, "chosen": [first, again, second], "rejected": "no."}
    batch = batch_of(example, length=80)
    assert counted_text(batch, 0, 0) == " it is.<|end|> yes.<|end|>"
    feedback = {"prompt": MESSAGES, "completion": example["chosen"], "label": True}
    columns, other = (KTO().tokenize(feedback | {"completion": text}, TOKENIZER) for text in (example["chosen"], "no."))
    others = [{f"other_{name}": array for name, array in part.items()} for part in (columns, other)]
    for mine, theirs, texts in (
        (other, others[0], (" no.<|end|>", " it is.<|end|> yes.<|end|>")),
        (columns, others[1], (" it is.<|end|> yes.<|end|>", " no.<|end|>")),
    ):
        rows = [KTO().sample({**mine, **theirs}, TOKENIZER, 80, np.random.default_rng(0))]
        batch = KTO().collate(rows, TOKENIZER, 80)
        assert (counted_text(batch, 0, 0), counted_text(batch, 0, 1)) == texts
        assert TOKENIZER.decode(batch.tokens[0][batch.segments[0] == 1].tolist(), special=True).count("is it so?") == 1


@pytest.mark.parametrize("objective", [DPO(), Reward()])
def test_a_pair_that_is_the_same_in_its_row_is_left_out(objective: Any) -> None:
    same_end = {"prompt": "?", "chosen": " a" + "x" * 40, "rejected": " b" + "x" * 40}
    same_start = {"prompt": "?", "chosen": "x" * 40 + "a", "rejected": "x" * 40 + "b"}
    kept = [
        len(objective.sample(objective.tokenize(example, TOKENIZER), TOKENIZER, 20, np.random.default_rng(0)))
        for example in (same_end, same_start)
    ]
    assert kept == ([1, 0] if isinstance(objective, DPO) else [0, 1])
    with pytest.raises(ValueError, match="are the same"):
        objective.tokenize(PAIR | {"rejected": PAIR["chosen"]}, TOKENIZER)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (PAIR | {"rejected": " it is."}, "are the same"),
        ({"prompt": "a", "chosen": "b"}, "needs examples with chosen, rejected"),
        ({"chosen": "yes", "rejected": "no"}, "no common start"),
        ({"chosen": "yes", "rejected": [{"role": "user", "content": "no"}]}, "must both be strings"),
        ({"prompt": 3, "chosen": "b", "rejected": "c"}, "`prompt` must be a string or a list of messages"),
        ({"prompt": "a", "chosen": MESSAGES, "rejected": "c"}, "its completion must be one"),
        ({"prompt": MESSAGES, "chosen": [], "rejected": "c"}, "at least one message"),
        (
            {"prompt": MESSAGES, "chosen": [{"role": "assistant", "content": "b"}, *MESSAGES], "rejected": "c"},
            "must end with a message of the assistant",
        ),
        (
            {"chosen": [*MESSAGES, *MESSAGES], "rejected": [*MESSAGES, {"role": "user", "content": "other"}]},
            "must begin with a message of the assistant",
        ),
    ],
)
def test_wrong_examples_are_refused(example: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DPO().tokenize(example, TOKENIZER)


def test_a_prompt_that_fills_the_row_is_left_out() -> None:
    pair = PAIR | {"chosen": "it is.", "rejected": "no."}
    columns, rng = DPO().tokenize(pair, TOKENIZER), np.random.default_rng(0)
    prompt = len(PAIR["prompt"])
    assert DPO().sample(columns, TOKENIZER, prompt, rng)
    assert not DPO().sample(columns, TOKENIZER, prompt - 1, rng)


def test_a_long_sequence_loses_its_last_tokens() -> None:
    batch = batch_of(PAIR, length=len(PAIR["prompt"]) + 2)
    assert counted_text(batch, 0, 0) == " it"


@pytest.mark.ledger("rlhf.dpo")
@pytest.mark.parametrize("loss", ["sigmoid", "robust"])
def test_dpo_starts_with_the_logarithm_of_2(loss: Any) -> None:
    model, batch = decoder(), batch_of(PAIR)
    batch = Batch(**batch, reference=reference_logprobs(model, batch))
    loss, count, metrics = DPO(loss=loss, label_smoothing=0.1)(model, batch)
    assert abs(loss / count - math.log(2)) < 1e-12
    assert metrics["margin"] == 0 and metrics["accuracy"] == 0.5


@pytest.mark.ledger("rlhf.dpo")
def test_dpo_is_the_pairwise_loss_of_its_implicit_reward() -> None:
    """The loss of a reward model, -log σ(r_chosen - r_rejected), with r = β log(π / π_ref)."""
    model, batch = decoder(), batch_of(PAIR, PAIR | {"rejected": " never!"})
    reference = torch.tensor([[-20.0, -9.0], [-21.0, -15.0]], dtype=torch.float64)
    logprobs, _, _ = sequence_logprobs(model, batch, 2)
    rewards = 0.1 * (logprobs - reference)
    expected = -torch.log(torch.sigmoid(rewards[:, 0] - rewards[:, 1])).sum()
    loss, _, metrics = DPO()(model, Batch(**batch, reference=reference))
    assert abs(loss - expected) < 1e-12
    assert abs(metrics["margin"] - (rewards[:, 0] - rewards[:, 1]).sum()) < 1e-12


def test_simpo_is_dpo_without_reference_per_token() -> None:
    model, batch = decoder(), batch_of(PAIR)
    plain = DPO(beta=2.0, reference_free=True, length_normalized=True)
    assert abs(SimPO(beta=2.0, margin=0.0)(model, batch)[0] - plain(model, batch)[0]) < 1e-12
    assert SimPO(beta=2.0, margin=1.0)(model, batch)[0] > plain(model, batch)[0]


def test_the_divergence_of_kto_has_no_gradient_and_is_not_negative() -> None:
    example = {"prompt": "is it so?", "completion": " it is.", "label": True}
    columns = KTO().tokenize(example, TOKENIZER)
    other = {
        f"other_{name}": value for name, value in KTO().tokenize(example | {"completion": " no."}, TOKENIZER).items()
    }
    (item,) = KTO().sample({**columns, **other}, TOKENIZER, 40, np.random.default_rng(0))
    model, batch = decoder(), KTO().collate([[item], [item]], TOKENIZER, 40)
    assert counted_text(batch, 0, 1) == " no.<|end|>"
    logprobs = reference_logprobs(model, batch)
    for shift, divergence in ((-3.0, 3.0), (3.0, 0.0)):
        reference = logprobs + torch.tensor([0.0, shift])
        loss, count, metrics = KTO()(model, Batch(**batch, reference=reference))
        assert abs(metrics["divergence"] / count - divergence) < 1e-9
        assert abs(loss / count - (1 - 1 / (1 + math.exp(0.1 * divergence)))) < 1e-9
    with pytest.raises(ValueError, match="must be true"):
        KTO().tokenize(example | {"label": "good"}, TOKENIZER)


def test_logprobs_in_chunks_equal_those_of_all_logits() -> None:
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*shape, dtype=torch.float64) for shape in ((10, 4), (7, 4), (7,)))
    targets = torch.randint(7, (10,))
    parameters = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    logits = 5 * torch.tanh(0.5 * (x @ weight.T + bias) / 5)
    log_p = logits.log_softmax(-1)
    factors = torch.arange(10.0, dtype=torch.float64)
    expected = torch.autograd.grad((factors * log_p.gather(-1, targets[:, None])[:, 0]).sum(), parameters)
    for chunk in (None, 3, 1):
        values, entropies = linear_logprobs(x, weight, targets, bias, 0.5, 5.0, chunk)
        assert (entropies + (log_p.exp() * log_p).sum(-1)).abs().max() < 1e-12 and not entropies.requires_grad
        gradients = torch.autograd.grad((factors * values).sum(), parameters)
        assert all((a - b).abs().max() < 1e-12 for a, b in zip(gradients, expected, strict=True))


def test_only_tokens_that_count_have_logprobs() -> None:
    model, batch = decoder(), batch_of(PAIR, {**PAIR, "chosen": " it is, it is so."[:5]})
    (values, entropies, _), _ = score_tokens(model, batch)
    counted = batch.weights > 0
    assert (values[counted] < 0).all() and (entropies[counted] > 0).all()
    assert not values[~counted].any() and not entropies[~counted].any()
    sums = sum_segments(values, batch.segments, 2)
    assert abs(sums[0, 1] - values[0][batch.segments[0] == 1].sum()) < 1e-12


def test_a_reference_table_survives_damage_and_is_computed_once(tmp_path: Path) -> None:
    model, batch = decoder(), batch_of(PAIR, PAIR | {"rejected": " never!"})
    calls = []

    def reference() -> torch.nn.Module:
        calls.append(1)
        return model

    file = tmp_path / "reference.safetensors"
    table = ReferenceTable(reference, file=file, owner="a run")
    table.complete([batch, batch])
    assert calls == [1] and torch.equal(table.add_to(batch).reference, reference_logprobs(model, batch))
    longer = batch_of(PAIR, PAIR | {"rejected": " never at all, in no world."})  # with other padding
    assert row_digests(longer)[0] == row_digests(batch)[0]
    again = ReferenceTable(reference, file=file, owner="a run")
    again.complete([batch])
    assert calls == [1] and again.values == table.values
    assert ReferenceTable(reference, file=file, owner="another run").values == {}
    content = bytearray(file.read_bytes())
    content[-20] ^= 1
    file.write_bytes(bytes(content))
    assert ReferenceTable(reference, file=file, owner="a run").values == {}
    file.write_bytes(b"")
    damaged = ReferenceTable(reference, file=file, owner="a run")
    damaged.complete([batch])
    assert calls == [1, 1] and damaged.values == table.values


def test_a_margin_of_none_is_no_margin() -> None:
    assert Reward().tokenize(PAIR | {"margin": None}, TOKENIZER)["margin"] == 0
    with pytest.raises(ValueError, match="the margin 'a' must be a finite number"):
        Reward().tokenize(PAIR | {"margin": "a"}, TOKENIZER)


def test_balanced_lengths_count_both_kinds_of_pairs_equally_also_in_truncated_rows() -> None:
    def message(content: str) -> list[dict[str, str]]:
        return [{"role": "assistant", "content": content}]

    prompt = [{"role": "user", "content": "?"}]
    long, short = message("a" * 60), message("b" * 50)
    examples = [{"prompt": prompt, "chosen": long, "rejected": short}] * 3
    examples.append({"prompt": prompt, "chosen": short, "rejected": long})
    splits = open_collection("pairs", examples, seed=0, hold_out=False)
    objective = Reward(balance_lengths=True).fit(splits, decoder())
    assert objective.longer_share == 0.75
    rows = [
        objective.sample(objective.tokenize(example, TOKENIZER), TOKENIZER, 16, np.random.default_rng(0))
        for example in examples
    ]
    weights = objective.collate(rows, TOKENIZER, 16).weights
    assert weights.tolist() == pytest.approx([2 / 3, 2 / 3, 2 / 3, 2])


def test_a_reference_table_is_written_while_it_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.training.reference.WRITE_EVERY", -1.0)
    model, batch, file = decoder(), batch_of(PAIR), tmp_path / "reference.safetensors"

    def killed() -> Iterator[Batch]:
        yield batch
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ReferenceTable(lambda: model, file=file).complete(killed())
    assert list(ReferenceTable(lambda: model, file=file).values) == row_digests(batch)


def test_a_reference_table_computes_missing_rows_when_they_are_needed() -> None:
    first, second, batch = decoder(), decoder(), batch_of(PAIR)
    table = ReferenceTable(lambda: second)
    table.complete([batch], first)
    other = batch_of(PAIR | {"chosen": " yes, it is."}, PAIR)
    with torch.no_grad():
        first.get_parameter("embedding.weight").mul_(2)  # trained in between
    assert torch.allclose(table.add_to(other).reference, reference_logprobs(second, other))


def test_a_few_pairs_that_fill_their_rows_are_refused_at_once() -> None:
    splits = open_collection("pairs", [PAIR], seed=0, hold_out=False)
    with pytest.raises(
        ValueError, match=r"100 examples in a row have nothing to train on: .*data\.length=4; use other"
    ):
        next(iter(Loader(splits.train, DPO(), TOKENIZER, rows=1, length=4)))
