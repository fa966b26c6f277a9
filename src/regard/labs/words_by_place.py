"""A fixed window learns each token separately at every position; recurrence and attention learn it for all at once.

A sequence has four positions of random tokens, one of which is marked by a token before it; the model has to repeat the
marked one at the end. In training some tokens occur only at the first two positions, all others anywhere; in the test
these rare tokens are marked at the fourth. A window has separate weights per position, so it has never been trained on
them there; recurrence and attention use the same weights at all positions. Bengio et al. 2003 describe this limit of
the window.
"""

# ledger: anc.mlp.slots

import torch

from regard.data.batch import Batch
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import accuracy, fit, generator
from regard.labs.small_models import MIXERS, decoder_spec
from regard.labs.tasks import FIRST, QUERY, decoder_batch
from regard.parts.window_mlp import WindowMLP

POSITIONS, SYMBOLS, RARE = 4, 24, 6  # in training the last RARE symbols occur only at the first two positions
MARK = FIRST + SYMBOLS
NAMES = ("window", "RNN", "LSTM", "attention")


def run(bench: Bench) -> Findings:
    steps = bench.training(1200, 2)
    accuracies: dict[str, list[float]] = {}
    for name in NAMES:
        torch.manual_seed(bench.seed)
        mixer = WindowMLP(POSITIONS + 2, 192) if name == "window" else MIXERS[name]
        model = decoder_spec(mixer, MARK + 1, 48, 1 if name == "window" else 2).build()
        fit(bench, name, model, marked_batch, steps, 4e-3)
        test = generator(bench.seed + 1)
        accuracies[name] = [accuracy(model, marked_batch(test, 256, position)) for position in range(POSITIONS)]
    table = [
        {"mixer": name} | {f"position {i}": share for i, share in enumerate(shares, 1)}
        for name, shares in accuracies.items()
    ]
    first, *_, fourth = accuracies["window"]
    checks = [
        Check("the window repeats the rare symbols at the first position", f"{first:.2f}", first > 0.9),
        Check("the window does not repeat them at the fourth position", f"{fourth:.2f}", fourth < 0.5),
        *(
            Check(
                f"{name} repeats them at the fourth position", f"{accuracies[name][-1]:.2f}", accuracies[name][-1] > 0.9
            )
            for name in NAMES[1:]
        ),
    ]
    lines = {name: list(enumerate(shares, 1)) for name, shares in accuracies.items()}
    plots = [Plot("position of the symbol", "accuracy", lines, "symbols trained at positions 1 and 2 only")]
    remark = (
        "Shared weights allow a symbol to be recognized at every position but do not ensure it: the state of a plain "
        "RNN after a symbol also depends on the earlier symbols. Gates and attention can keep a symbol unchanged."
    )
    return Findings(table, checks, plots, remark)


def marked_batch(rng: torch.Generator, rows: int = 64, position: int | None = None) -> Batch:
    """A mark before one of the symbols, which is the target at the end; with `position`, a rare symbol there."""
    early = torch.randint(FIRST, FIRST + SYMBOLS, (rows, 2), generator=rng)
    late = torch.randint(FIRST, FIRST + SYMBOLS - RARE, (rows, POSITIONS - 2), generator=rng)
    symbols = torch.cat([early, late], 1)  # (B, positions)
    chosen = torch.randint(0, POSITIONS, (rows, 1), generator=rng)
    if position is not None:
        chosen.fill_(position)
        symbols[:, position] = torch.randint(FIRST + SYMBOLS - RARE, FIRST + SYMBOLS, (rows,), generator=rng)
    index = torch.arange(POSITIONS + 1)
    tokens = symbols.gather(1, index - (index > chosen).long()).scatter(1, chosen, MARK)
    source = torch.cat([tokens, torch.full((rows, 1), QUERY)], 1)
    return decoder_batch(source, symbols.gather(1, chosen))
