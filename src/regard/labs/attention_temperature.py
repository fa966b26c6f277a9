"""Without the factor 1/√d_k wide heads saturate the softmax and learning stalls; with it, the width changes nothing.

One layer with one head of d_k dimensions learns associative recall, with the scores q kᵀ / √d_k or q kᵀ. Before
training: the entropy of the rows of attention, and the norm of the gradient of the scores of a query, of the median
query and of all together. A row that is nearly one-hot passes on almost no gradient, but queries with two equal best
keys still do, so that the sum tells less than the median. After training, at the better of two learning rates: loss and
accuracy on new sequences. Guessing among the values of a sequence has an accuracy of 1/4; a head that is no more than
halfway from guessing to 1 counts as stalled.

Vaswani et al. 2017. The lab attention-scores compares both with additive scores.
"""

# ledger: attn.scale.learn

import statistics

import torch

from regard.labs.attention_scores import FIRST, PAIRS, SYMBOLS, WIDTH, make_batch
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import accuracy, fit, generator
from regard.labs.small_models import decoder_spec
from regard.lens import entropy, record
from regard.models.decoder import DecoderModule
from regard.objectives.next_token import next_token
from regard.parts.attention import Attention

LEARNING_RATES = (1e-3, 3e-3)
NAMES = ("scaled", "not scaled")
HALFWAY = (1 + 1 / PAIRS) / 2


def run(bench: Bench) -> Findings:
    dims, steps = bench.setting((16, 128, 512), (4, 8)), bench.training(300, 2)
    found: dict[str, dict[int, dict[str, float]]] = {name: {} for name in NAMES}
    for dim in dims:
        for name in NAMES:
            runs = [train(bench, name, dim, rate, steps) for rate in LEARNING_RATES]
            loss, recall = min(runs)
            found[name][dim] = new_rows(build(bench.seed, name, dim)) | {"loss": loss, "accuracy": recall}
    narrow, wide = dims[0], dims[-1]
    scaled, unscaled = found["scaled"], found["not scaled"]

    def change(rows: dict[int, dict[str, float]], key: str) -> float:
        return rows[wide][key] / rows[narrow][key]

    checks = [
        Check(f"scaled: from d_k = {narrow} to {wide} the entropy of new rows changes by less than a tenth",
              f"a factor of {change(scaled, 'entropy'):.2f}", abs(change(scaled, "entropy") - 1) < 0.1),
        Check("not scaled: it falls to less than half", f"{change(unscaled, 'entropy'):.2f}",
              change(unscaled, "entropy") < 0.5),
        Check("not scaled: the gradient of the scores of the median query falls to less than a tenth",
              f"{change(unscaled, 'median gradient'):.2g}", change(unscaled, "median gradient") < 0.1),
        Check("not scaled: the gradient of the scores of all queries falls to less than a tenth",
              f"{change(unscaled, 'gradient'):.2f}", change(unscaled, "gradient") < 0.1),
        Check("scaled: the accuracy after training differs by less than 0.05 between all widths",
              " ".join(f"{row['accuracy']:.2f}" for row in scaled.values()),
              max(row["accuracy"] for row in scaled.values()) - min(row["accuracy"] for row in scaled.values()) < 0.05),
        Check(f"not scaled, d_k = {wide}: learning stalls, with an accuracy below {HALFWAY}",
              f"{unscaled[wide]['accuracy']:.2f}", unscaled[wide]["accuracy"] < HALFWAY),
        Check(f"not scaled, d_k = {wide}: the loss is more than twice that with the factor",
              f"{unscaled[wide]['loss']:.3f} and {scaled[wide]['loss']:.3f}",
              unscaled[wide]["loss"] > 2 * scaled[wide]["loss"]),
    ]  # fmt: skip
    table = [{"scores": name, "d_k": dim} | row for name, rows in found.items() for dim, row in rows.items()]

    def lines(key: str) -> dict[str, list[tuple[float, float]]]:
        return {name: [(dim, row[key]) for dim, row in rows.items()] for name, rows in found.items()}

    plots = [
        Plot("d_k", "entropy of rows, nats", lines("entropy"), "new", "x"),
        Plot("d_k", "gradient of scores, median", lines("median gradient"), "new", "xy"),
        Plot("d_k", "loss", lines("loss"), f"after {steps} steps", "xy"),
    ]
    return Findings(table, checks, plots, f"Better of {len(LEARNING_RATES)} learning rates, by the final loss.")


def build(seed: int, name: str, dim: int) -> DecoderModule:
    torch.manual_seed(seed)
    mixer = Attention(1, head_dim=dim, scale=1.0 if name == "not scaled" else None)
    return decoder_spec(mixer, FIRST + SYMBOLS, WIDTH, 1, convolution=True).build()


def new_rows(model: DecoderModule) -> dict[str, float]:
    """The mean entropy of the rows of attention, and gradients of the scores, for one batch."""
    with record(model, ("*.body.scores", "*.body.pattern"), grad=True) as recorded:
        loss, count, _ = next_token(model, make_batch(generator(0)))
    name = next(name for name in recorded if name.endswith("scores"))
    (gradient,) = torch.autograd.grad(loss / count, recorded[name])
    per_query = gradient.norm(dim=-1).flatten()  # only queries whose token is predicted have one
    rows = recorded[name.replace("scores", "pattern")].detach()
    return {
        "entropy": float(entropy(rows).mean()),
        "median gradient": float(per_query[per_query > 0].median()),
        "gradient": float(per_query.norm()),
    }


def train(bench: Bench, name: str, dim: int, rate: float, steps: int) -> tuple[float, float]:
    """Final loss, and accuracy on new sequences."""
    model = build(bench.seed, name, dim)
    history = fit(bench, f"{name}, d_k = {dim}, rate {rate:g}", model, make_batch, steps, rate)
    recall = accuracy(model, make_batch(generator(bench.seed + 1), bench.setting(256, 8)))
    return statistics.fmean(history["loss"][-20:]), recall
