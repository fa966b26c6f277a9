"""Training on a small set makes a specialist of a broad model.

The broad model is trained on four languages of random rules (labs/fine_tuning.py) and a little on a fifth, one sequence
in 64; the first symbol of a sequence names its language. Then it is tuned on a small set of sequences of the fifth.
Measured are the accuracy on new sequences of this language, and the loss on the four others. A model that is trained
from scratch on the same small set shows what the broad model contributes, and one that is tuned on the small set and on
as many sequences of the four languages shows whether their loss has to rise.
"""

# ledger: ft.specialist

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor

from regard.data.batch import Batch
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fine_tuning import SYMBOLS, WIDTH, Language, mean_loss
from regard.labs.fit import accuracy, fit, generator
from regard.labs.small_models import small_decoder
from regard.labs.tasks import whole_rows

LANGUAGES, ROWS, SMALL_SET, TESTED = 4, 32, 256, 256
RARE = 64  # one sequence in so many is of the language of the specialist, the last one
RATE = 1e-3  # of tuning


def named_rows(sequences: Tensor, languages: Tensor | int) -> Batch:
    """Sequences after the symbol of their language; what follows from rules is predicted."""
    names = torch.full((len(sequences), 1), SYMBOLS) + torch.as_tensor(languages).view(-1, 1)
    tokens = torch.cat([names.expand(len(sequences), 1), sequences], 1)
    weights = (
        torch.arange(tokens.shape[1] - 1).expand(len(tokens), -1) >= 2
    )  # the first two symbols follow from nothing
    return whole_rows(tokens[:, :-1], tokens[:, 1:], weights)


def mixture(languages: Sequence[Language], rng: torch.Generator, rows: int) -> Batch:
    """The same number of sequences of every language."""
    each = rows // len(languages)
    sequences = torch.cat([language.sequences(rng, each) for language in languages])
    return named_rows(sequences, torch.arange(len(languages)).repeat_interleave(each))


def join(*parts: Batch) -> Batch:
    return Batch(**{name: torch.cat([part[name] for part in parts]) for name in parts[0].fields})


def run(bench: Bench) -> Findings:
    rng = generator(bench.seed + 1)
    *common, rare = (Language.draw(rng) for _ in range(LANGUAGES + 1))
    small_set = rare.sequences(rng, SMALL_SET)
    own = named_rows(rare.sequences(rng, TESTED), LANGUAGES)
    others = mixture(common, rng, TESTED)

    def broad_rows(rng: torch.Generator) -> Batch:
        batch = mixture(common, rng, ROWS)
        if torch.rand((), generator=rng) > ROWS / RARE:
            return batch
        return join(batch.rows(slice(1, None)), named_rows(rare.sequences(rng, 1), LANGUAGES))

    def small_rows(rng: torch.Generator, rows: int = ROWS) -> Batch:
        return named_rows(small_set[torch.randint(SMALL_SET, (rows,), generator=rng)], LANGUAGES)

    def with_others(rng: torch.Generator) -> Batch:
        return join(small_rows(rng, ROWS // 2), mixture(common, rng, ROWS // 2))

    torch.manual_seed(bench.seed)
    fresh = small_decoder("attention", SYMBOLS + LANGUAGES + 1, WIDTH)
    broad, scratch = deepcopy(fresh), fresh
    steps = bench.training(150, 2)
    fit(bench, "broad model", broad, broad_rows, bench.training(800, 2))
    fit(bench, "from scratch", scratch, small_rows, steps)
    specialist, mixed = deepcopy(broad), deepcopy(broad)
    fit(bench, "specialist", specialist, small_rows, steps, RATE)
    fit(bench, "with the other languages", mixed, with_others, steps, RATE)
    models = {"broad": broad, "specialist": specialist, "with the others": mixed, "from scratch": scratch}
    accuracies = {name: accuracy(model, own) for name, model in models.items()}
    losses = {name: mean_loss(model, others) for name, model in models.items()}
    checks = [
        Check("on its language the specialist is right at least 0.1 more often than the broad model",
              f"{accuracies['broad']:.2f} to {accuracies['specialist']:.2f}",
              accuracies["specialist"] >= accuracies["broad"] + 0.1),
        Check("and at least 0.1 more often than a model trained on the small set from scratch",
              f"{accuracies['from scratch']:.2f}", accuracies["specialist"] >= accuracies["from scratch"] + 0.1),
        Check("its loss on the other languages is higher than before, by more than 0.1 nats",
              f"{losses['broad']:.2f} to {losses['specialist']:.2f}", losses["specialist"] > losses["broad"] + 0.1),
        Check("with sequences of the others in the batches it rises by less than half as much",
              f"{losses['with the others']:.2f}",
              losses["with the others"] - losses["broad"] < (losses["specialist"] - losses["broad"]) / 2),
    ]  # fmt: skip
    table = [
        {"model": name, "accuracy on its language": accuracies[name], "loss on the others": losses[name]}
        for name in models
    ]
    plots = [
        Plot("", "accuracy on one language", {"accuracy": list(enumerate(accuracies.values()))}, groups=tuple(models)),
        Plot("", "loss on the others, nats", {"loss": list(enumerate(losses.values()))}, groups=tuple(models)),
    ]
    remark = f"The small set has {SMALL_SET} sequences. One symbol in ten is random, so no accuracy is above 0.91."
    return Findings(table, checks, plots, remark)
