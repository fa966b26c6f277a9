"""After A B … A an induction head attends to B and copies it; it needs two layers and a previous-token head.

Random symbols are repeated with a random period, so that no fixed offset finds the earlier occurrence. Decoders of one
and of two layers are trained to predict every symbol after the first period. `score_heads` measures which heads attend
to the previous token and which to the token after the earlier occurrence of the current one. Then heads of the two
layers are removed: the induction heads, the previous-token heads, and each of the others.
"""

# ledger: lens.induction lens.previous

import torch

from regard.data.batch import Batch
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import accuracy, fit, generator
from regard.labs.small_models import small_decoder
from regard.labs.tasks import FIRST, draw_symbols, whole_rows
from regard.lens import ablate, score_heads
from regard.lens.circuits import HeadIndex
from regard.models.decoder import DecoderModule

SYMBOLS, LENGTH, SHORTEST, LONGEST = 48, 64, 8, 28
FOUND = 0.4  # the weight from which a head counts as one of a kind


def repeated_symbols(rng: torch.Generator, rows: int = 32) -> Batch:
    """Each row repeats its own random symbols with its own period; tokens after the first period are predicted."""
    symbols = draw_symbols(rng, SYMBOLS, rows, LONGEST)
    periods = torch.randint(SHORTEST, LONGEST + 1, (rows, 1), generator=rng)
    tokens = symbols.gather(1, torch.arange(LENGTH + 1) % periods)  # (B, L + 1)
    weights = torch.arange(LENGTH) >= periods
    return whole_rows(tokens[:, :-1], tokens[:, 1:], weights)


def run(bench: Bench) -> Findings:
    models = {layers: train(bench, layers) for layers in (1, 2)}
    accuracies = {layers: test_accuracy(bench, model) for layers, model in models.items()}
    scores = {layers: score_heads(model, FIRST + SYMBOLS, length=24) for layers, model in models.items()}
    best = {layers: strongest(found.scores["induction"]) for layers, found in scores.items()}
    model, found = models[2], scores[2]
    induction = [(layer, head) for layer, head, _ in found.find("induction", FOUND)]
    previous = [(layer, head) for layer, head, _ in found.find("previous token", 0.5)]
    others = [(layer, head) for layer in range(2) for head in range(4) if (layer, head) not in induction + previous]
    without = {
        "induction heads": removed(bench, model, induction),
        "previous-token heads": removed(bench, model, previous),
        "all other heads, one by one, least": min((removed(bench, model, [head]) for head in others), default=1.0),
    }
    previous_best = strongest(found.scores["previous token"])
    chance = accuracies[1]
    checks = [
        Check("two layers predict the repetition, with an accuracy above 0.9", f"{accuracies[2]:.2f}",
              accuracies[2] > 0.9),
        Check("one layer does not: its accuracy is below 0.5", f"{accuracies[1]:.2f}", accuracies[1] < 0.5),
        Check(f"the second layer has a head with a weight above {FOUND} on the token after the earlier occurrence",
              f"{best[2]:.2f}", bool(induction) and all(layer == 1 for layer, _ in induction)),
        Check(f"one layer has no such head above {FOUND}", f"{best[1]:.2f}", best[1] <= FOUND),
        Check("the first layer has a head with a weight above 0.5 on the previous token", f"{previous_best:.2f}",
              any(layer == 0 for layer, _ in previous)),
        Check("without the induction heads the gain over one layer is gone, within a tenth of it",
              f"{without['induction heads']:.2f}",
              without["induction heads"] < chance + 0.1 * (accuracies[2] - chance)),
        Check("without the previous-token heads more than half of the gain is gone",
              f"{without['previous-token heads']:.2f}",
              without["previous-token heads"] < (accuracies[2] + chance) / 2),
        Check("without any one of the other heads more than 0.8 is predicted",
              f"{without['all other heads, one by one, least']:.2f}",
              without["all other heads, one by one, least"] > 0.8),
    ]  # fmt: skip
    table = [
        {"model": "one layer", "accuracy": accuracies[1]},
        {"model": "two layers", "accuracy": accuracies[2]},
        *({"model": f"two layers without {name}", "accuracy": value} for name, value in without.items()),
    ]
    names = ("one layer", "two layers", "without induction", "without previous", "without another")
    bars = list(enumerate([accuracies[1], accuracies[2], *without.values()]))
    layers = {
        f"layer {i}": list(enumerate([strongest(scores[i : i + 1]) for scores in found.scores.values()]))
        for i in range(2)
    }  # fmt: skip
    plots = [
        Plot("", "accuracy after the first period", {"accuracy": bars}, groups=names),
        Plot("", "weight of the strongest head", layers, "two layers", groups=tuple(found.scores)),
    ]
    return Findings(
        table, checks, plots, f"Guessing: {1 / SYMBOLS:.3f}. Heads are removed by setting their output to 0."
    )


def train(bench: Bench, layers: int) -> DecoderModule:
    torch.manual_seed(bench.seed)
    model = small_decoder("attention", FIRST + SYMBOLS, 64, layers)
    label = "one layer" if layers == 1 else "two layers"
    fit(bench, label, model, repeated_symbols, bench.training(1600, 2), stop_below=0.02)
    return model


def test_accuracy(bench: Bench, model: DecoderModule) -> float:
    rng = generator(bench.seed + 1)
    return sum(accuracy(model, repeated_symbols(rng)) for _ in range(4)) / 4


def removed(bench: Bench, model: DecoderModule, heads: list[HeadIndex]) -> float:
    with ablate(model, heads=heads):
        return test_accuracy(bench, model)


def strongest(scores: list) -> float:
    return max(float(layer.max()) for layer in scores if layer is not None)
