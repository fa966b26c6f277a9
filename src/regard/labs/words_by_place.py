"""A fixed window must learn a word anew in every place; recurrence and attention know it in all of them.

Four places of random words, one of which is marked by a word before it; the model is to repeat that word at the end.
In training some words stand in the first two places only, all others anywhere; then these are marked in the fourth. A
window has weights for every place, so it has never seen these words there; recurrence and attention use the same
weights for all places. Bengio et al. 2003 named this the window's limit.
"""

# ledger: anc.mlp.slots

import torch

from regard.data.batch import Batch
from regard.labs.bench import Bench
from regard.labs.contenders import MIXERS, spec
from regard.labs.findings import Check, Findings, Plot
from regard.labs.fit import accuracy, fit, generator
from regard.labs.tasks import ASK, FIRST, while_reading
from regard.parts.window_mlp import WindowMLP

PLACES, WORDS, RARE = 4, 24, 6  # the last RARE words stand in the first two places only
MARK = FIRST + WORDS
NAMES = ("window", "RNN", "LSTM", "attention")


def run(bench: Bench) -> Findings:
    steps = bench.pick(1200, 2)
    known: dict[str, list[float]] = {}
    for name in NAMES:
        torch.manual_seed(bench.seed)
        mixer = WindowMLP(PLACES + 2, 192) if name == "window" else MIXERS[name]
        model = spec(mixer, MARK + 1, 48, 1 if name == "window" else 2).build()
        fit(bench, name, model, marked, steps, 4e-3)
        test = generator(bench.seed + 1)
        known[name] = [accuracy(model, marked(test, 256, place)) for place in range(PLACES)]
    table = [{"mixer": name} | {f"place {i}": r for i, r in enumerate(right, 1)} for name, right in known.items()]
    first, *_, fourth = known["window"]
    checks = [
        Check("the window knows the words where it saw them", f"{first:.2f}", first > 0.9),
        Check("the window does not know them in the fourth place", f"{fourth:.2f}", fourth < 0.5),
        *(Check(f"{name} knows them there too", f"{known[name][-1]:.2f}", known[name][-1] > 0.9) for name in NAMES[1:]),
    ]
    lines = {name: list(enumerate(right, 1)) for name, right in known.items()}
    plots = [Plot("place in which the word stands", "accuracy", lines, "words seen in places 1 and 2 only")]
    remark = (
        "The same weights in every place allow a word to be known everywhere, they do not compel it: what a plain RNN "
        "keeps of a word also depends on what came before. Gates and attention can keep it as it is."
    )
    return Findings(table, checks, plots, remark)


def marked(draws: torch.Generator, rows: int = 64, place: int | None = None) -> Batch:
    """A mark before one of the words, which is to be said at the end. With a place: a rare word is marked, there."""
    early = torch.randint(FIRST, FIRST + WORDS, (rows, 2), generator=draws)
    late = torch.randint(FIRST, FIRST + WORDS - RARE, (rows, PLACES - 2), generator=draws)
    words = torch.cat([early, late], 1)  # (B, places)
    chosen = torch.randint(0, PLACES, (rows, 1), generator=draws)
    if place is not None:
        chosen.fill_(place)
        words[:, place] = torch.randint(FIRST + WORDS - RARE, FIRST + WORDS, (rows,), generator=draws)
    slots = torch.arange(PLACES + 1)
    read = words.gather(1, slots - (slots > chosen).long()).scatter(1, chosen, MARK)
    source = torch.cat([read, torch.full((rows, 1), ASK)], 1)
    return while_reading(source, words.gather(1, chosen))
