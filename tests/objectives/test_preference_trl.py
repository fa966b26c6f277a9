"""One step on preference data equals TRL: loss, gradients of all weights, and metrics.

The models are a tiny random GPT-2 of `transformers` and ours with the same weights; the reference has other weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from regard.checkpoint import load
from regard.data.batch import Batch
from regard.families import family
from regard.objectives.base import Objective
from regard.objectives.kto import KTO
from regard.objectives.preference import DPO, ORPO, SimPO
from regard.objectives.preference_pairs import pack_together
from regard.objectives.reward import Reward
from regard.spec import Spec
from regard.text.tokenizer import Tokenizer
from regard.text.train import character
from regard.training.new_head import with_new_head, with_weights_of
from regard.training.reference import reference_logprobs
from tests.families.pairs import make_pair

GPT2 = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.2}
PAIRS = [
    {"prompt": f"the cat {n}", "chosen": " saw it all day."[: 5 + 2 * n], "rejected": " ate us."[: 8 - n]}
    for n in range(4)
]
FEEDBACK = [{"prompt": pair["prompt"], "completion": pair["chosen"], "label": n != 1} for n, pair in enumerate(PAIRS)]
LENGTH, BETA = 40, 0.3
LIMIT = 1e-5  # TRL computes log-probabilities in float32


@dataclass
class Models:
    """`theirs` and `ours` have the same weights; so do `their_reference` and `our_reference`."""

    theirs: Any
    ours: Any
    their_reference: Any
    our_reference: Any
    tokenizer: Tokenizer
    their_tokenizer: Any
    folder: Path


@pytest.fixture
def models(tmp_path: Path) -> Models:
    tokenizer = character([text for pair in PAIRS for text in pair.values()])
    tokenizer.save(tmp_path / "tokenizer")
    reference = make_pair(("GPT2LMHeadModel", GPT2 | {"vocab_size": tokenizer.vocab_size}), tmp_path / "reference")
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "reference").eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    theirs.save_pretrained(tmp_path / "policy")
    ours, their_tokenizer = (
        load(tmp_path / "policy"),
        transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer"),
    )
    return Models(theirs, ours, reference.theirs, reference.ours, tokenizer, their_tokenizer, tmp_path)


def batch_of(objective: Objective, examples: list[dict[str, Any]], models: Models) -> Batch:
    columns = [objective.tokenize(example, models.tokenizer) for example in examples]
    batch = objective.collate([[item] for item in columns], models.tokenizer, LENGTH)
    return Batch(**batch, reference=reference_logprobs(models.our_reference, batch))


def assert_equal_gradients(models: Models) -> None:
    table = family("gpt2").table(models.ours.spec)
    ours = dict(table.write({name: p.grad for name, p in models.ours.named_parameters()}))
    theirs = {name: p.grad for name, p in models.theirs.named_parameters()}
    largest = max(gradient.abs().max() for gradient in theirs.values())
    assert ours.keys() == theirs.keys() and largest > 1e-2
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).abs().max() <= LIMIT * max(1.0, largest), name


@pytest.mark.ledger("rlhf.dpo")
@pytest.mark.parametrize(
    ("objective", "settings"),
    [
        (DPO(beta=BETA), {}),
        (DPO(beta=BETA, loss="hinge"), {"loss_type": "hinge"}),
        (DPO(beta=BETA, loss="ipo"), {"loss_type": "ipo"}),
        (DPO(beta=BETA, loss="robust", label_smoothing=0.2), {"loss_type": "robust", "label_smoothing": 0.2}),
        (DPO(beta=BETA, length_normalized=True), {"loss_type": "sigmoid_norm"}),
        (DPO(beta=BETA, likelihood=0.5), {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}),
    ],
    ids=["sigmoid", "hinge", "ipo", "robust", "length_normalized", "likelihood"],
)
def test_dpo(objective: DPO, settings: dict[str, Any], models: Models) -> None:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    pairs = PAIRS[:1] if objective.likelihood else PAIRS  # TRL takes the mean over the tokens of all pairs
    arguments = DPOConfig(
        str(models.folder / "trl"), report_to=[], use_cpu=True, bf16=False, disable_tqdm=True, beta=BETA,
        gradient_checkpointing=False, per_device_train_batch_size=len(pairs), **settings,
    )  # fmt: skip
    trainer = DPOTrainer(
        models.theirs, models.their_reference, arguments,
        train_dataset=Dataset.from_list(pairs), processing_class=models.their_tokenizer,
    )  # fmt: skip
    inputs = next(iter(trainer.get_train_dataloader()))
    models.theirs.eval()  # GPT-2 has dropout
    expected = trainer.compute_loss(models.theirs, inputs)
    expected.backward()
    batch = batch_of(objective, pairs, models)
    sequences = [
        row[mask.bool()].tolist() for row, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    ]
    assert sorted(sequences) == sorted(our_sequences(batch))
    loss, count, metrics = objective(models.ours, batch)
    (loss / count).backward()
    assert abs(loss / count - expected) <= LIMIT
    assert_equal_gradients(models)
    theirs = {name: values[-1] for name, values in trainer._metrics["eval"].items()}  # of a model in eval mode
    if not objective.length_normalized and objective.loss != "ipo":  # TRL measures sums, whatever the loss
        for name, key in {"chosen_reward": "chosen", "rejected_reward": "rejected", "margin": "margins"}.items():
            assert abs(metrics[name] / count - theirs[f"rewards/{key}"]) <= LIMIT
        assert metrics["accuracy"] / count == theirs["rewards/accuracies"]


def our_sequences(batch: Batch) -> list[list[int]]:
    """The tokens of all sequences of a packed batch, with the last target."""
    sequences = []
    for tokens, targets, segments in zip(batch.tokens, batch.targets, batch.segments, strict=True):
        for segment in (0, 1):
            inside = segments == segment
            sequences.append([*tokens[inside].tolist(), int(targets[inside][-1])])
    return sequences


def test_kto(models: Models) -> None:
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    arguments = KTOConfig(
        str(models.folder / "trl"), report_to=[], use_cpu=True, bf16=False, disable_tqdm=True, beta=BETA,
        desirable_weight=1.3, undesirable_weight=0.7, gradient_checkpointing=False,
        per_device_train_batch_size=len(FEEDBACK),
    )  # fmt: skip
    trainer = KTOTrainer(
        models.theirs, models.their_reference, arguments,
        train_dataset=Dataset.from_list(FEEDBACK), processing_class=models.their_tokenizer,
    )  # fmt: skip
    inputs = next(iter(trainer.get_train_dataloader()))
    models.theirs.eval()
    expected = trainer.compute_loss(models.theirs, inputs)
    expected.backward()
    objective = KTO(beta=BETA, good_weight=1.3, bad_weight=0.7)
    batch = batch_of_kto(inputs, models)
    loss, count, metrics = objective(models.ours, batch)
    (loss / count).backward()
    assert metrics["divergence"] > 0, "otherwise the estimate of the divergence is not tested"
    assert abs(loss / count - expected) <= LIMIT
    assert_equal_gradients(models)


def batch_of_kto(inputs: dict[str, Tensor], models: Models) -> Batch:
    """Our batch with TRL's sequences and its choice of other completions."""

    def items(prefix: str) -> list[dict[str, Any]]:
        rows = (inputs[f"{prefix}{name}"].numpy() for name in ("input_ids", "attention_mask", "completion_mask"))
        cut = [(ids[mask > 0], counted[mask > 0]) for ids, mask, counted in zip(*rows, strict=True)]
        return [{"tokens": ids[:-1], "targets": ids[1:], "weights": counted[1:]} for ids, counted in cut]

    pairs = list(map(list, zip(items(""), items("KL_"), strict=True)))
    batch = Batch(**pack_together(pairs, models.tokenizer), labels=torch.as_tensor(inputs["label"]))
    return Batch(**batch, reference=reference_logprobs(models.our_reference, batch))


def their_logprobs(models: Models, batch: Batch) -> tuple[Tensor, Tensor]:
    """log π of the two sequences of every pair by a plain forward of each, and their numbers of tokens, (B, 2)."""
    sums, lengths = [], []
    for tokens, targets, segments, weights in zip(
        batch.tokens, batch.targets, batch.segments, batch.weights, strict=True
    ):
        for segment in (0, 1):
            inside = segments == segment
            logits = models.theirs(tokens[inside].unsqueeze(0)).logits[0]
            losses = F.cross_entropy(logits, targets[inside], reduction="none")
            sums.append(-(losses * weights[inside]).sum())
            lengths.append(weights[inside].sum())
    return torch.stack(sums).view(-1, 2), torch.stack(lengths).view(-1, 2)


def simpo_of_trl(sums: Tensor, lengths: Tensor) -> Tensor:
    from trl.experimental.cpo import CPOTrainer

    trainer = SimpleNamespace(
        loss_type="simpo", beta=2.5, simpo_gamma=0.7, label_smoothing=0.0, alpha=0.0,
        accelerator=SimpleNamespace(device="cpu"),
    )  # fmt: skip
    return CPOTrainer.cpo_loss(trainer, *(sums / lengths).unbind(-1))[0].mean()


def orpo_of_trl(sums: Tensor, lengths: Tensor) -> Tensor:
    """The likelihood is that of the completion, as in the paper; TRL's trainer also counts the prompt."""
    from trl.experimental.orpo import ORPOTrainer

    trainer = SimpleNamespace(beta=0.4, accelerator=SimpleNamespace(device="cpu"))
    means = sums / lengths
    return -means[:, 0].mean() - ORPOTrainer.odds_ratio_loss(trainer, *means.unbind(-1))[0].mean()


@pytest.mark.parametrize(
    ("objective", "theirs"),
    [(SimPO(beta=2.5, margin=0.7), simpo_of_trl), (ORPO(weight=0.4), orpo_of_trl)],
    ids=["simpo", "orpo"],
)
def test_losses_without_a_reference(
    objective: Objective, theirs: Callable[[Tensor, Tensor], Tensor], models: Models
) -> None:
    batch = batch_of(objective, PAIRS, models)
    expected = theirs(*their_logprobs(models, batch))
    expected.backward()
    loss, count, _ = objective(models.ours, batch)
    (loss / count).backward()
    assert abs(loss / count - expected) <= LIMIT
    assert_equal_gradients(models)


@pytest.mark.ledger("rlhf.reward")
def test_reward_model(models: Models) -> None:
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    theirs = transformers.GPT2ForSequenceClassification.from_pretrained(
        models.folder / "policy", num_labels=1, pad_token_id=models.tokenizer.pad
    ).eval()
    table = with_new_head(models.ours.spec, {"kind": "classification", "labels": 1})
    ours = with_weights_of(models.ours, Spec.from_dict(table).build(seed=0))
    with torch.no_grad():
        ours.head.labels.weight.copy_(theirs.score.weight)
    pairs = [pair | {"margin": 0.2 * n} for n, pair in enumerate(PAIRS)]
    arguments = RewardConfig(
        str(models.folder / "trl"), report_to=[], use_cpu=True, bf16=False, disable_tqdm=True,
        center_rewards_coefficient=0.05, gradient_checkpointing=False, per_device_train_batch_size=len(PAIRS),
    )  # fmt: skip
    trainer = RewardTrainer(
        theirs, arguments, train_dataset=Dataset.from_list(pairs), processing_class=models.their_tokenizer
    )
    inputs = next(iter(trainer.get_train_dataloader()))
    theirs.eval()
    expected = trainer.compute_loss(theirs, inputs)
    expected.backward()
    objective = Reward(center=0.05)
    rows = [[objective.tokenize(pair, models.tokenizer)] for pair in pairs]
    loss, count, metrics = objective(ours, objective.collate(rows, models.tokenizer, LENGTH))
    (loss / count).backward()
    assert abs(loss / count - expected) <= LIMIT
    pairs_of_gradients = [
        (ours.head.labels.weight, theirs.score.weight),
        (ours.input.table.weight, theirs.transformer.wte.weight),
        (ours.norm.weight, theirs.transformer.ln_f.weight),
    ]
    assert all((a.grad - b.grad).abs().max() <= LIMIT for a, b in pairs_of_gradients)
    theirs_measured = {name: values[-1] for name, values in trainer._metrics["eval"].items()}
    for name in ("accuracy", "margin"):
        assert abs(metrics[name] / count - theirs_measured[name]) <= LIMIT
