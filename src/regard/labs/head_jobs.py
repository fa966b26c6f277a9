"""Trained heads specialise unsupervised: some attend to the previous word, others to syntax, a referent, or meaning.

Five jobs, each a link between two words of made-up sentences: a word and the previous one, a noun and its determiner, a
verb and its subject, a pronoun and its noun (as in the lab syntax-heads), and in a list the last word and the only one
of its own kind, such as two fruits among other things. For each head of SmolLM2 the choice is the earlier word with the
largest weight, the first word excluded. The best head for each job is chosen on half of the sentences and tested on the
other half. A head is a specialist if it is right on its own job more often than on average on the other four, by 0.3 or
more. The heads of a model with the same sizes and random weights show what chance and position would do.

Clark et al. 2019; Voita et al. 2019.
"""

# ledger: mha.specialise

from random import Random

import torch

from regard.data.world.english import FOOD, INDOORS, SHE
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.syntax_heads import (
    LINKS,
    WORKERS,
    Sentence,
    choose_and_test,
    correct_heads,
    noun_to_determiner,
    pronoun_to_noun,
    verb_to_subject,
)
from regard.labs.trained_model import load_trained

COLOURS = ("red", "blue", "green", "yellow", "white", "black", "brown")
NUMBERS = ("three", "seven", "eleven", "twenty", "forty", "nine")
KINDS = (FOOD, INDOORS, SHE, WORKERS, COLOURS, NUMBERS)


def word_to_previous(rng: Random) -> Sentence:
    words, last, _ = rng.choice((noun_to_determiner, verb_to_subject, pronoun_to_noun))(rng)
    word = rng.randrange(2, last + 1)
    return words, word, word - 1


def word_to_kind(rng: Random) -> Sentence:
    """A list whose last word has one other of its kind, at a random place."""
    kinds = rng.sample(KINDS, 5)
    words = [rng.choice(kind) for kind in kinds]
    place = rng.randrange(4)
    first, last = rng.sample(kinds[place], 2)
    words[place] = first
    listed = [f"{word}," for word in words[:4]]
    return ["List:", *listed, last], 5, 1 + place


JOBS = {"previous word": word_to_previous, **LINKS, "word, same kind": word_to_kind}


@torch.no_grad()
def run(bench: Bench) -> Findings:
    model, encode = load_trained(bench)
    torch.manual_seed(bench.seed)
    models = {"trained": model, "random weights": model.spec.build().eval()}
    count, rng = bench.setting(25, 2), Random(bench.seed)
    sentences = {job: [make(rng) for _ in range(2 * count)] for job, make in JOBS.items()}
    best: dict[str, dict[str, tuple[int, float]]] = {}
    for name, one in models.items():
        right = {job: torch.stack([correct_heads(one, encode, *sentence) for sentence in bench.each(job, found)])
                 for job, found in sentences.items()}  # fmt: skip
        best[name] = {job: choose_and_test(found, count) for job, found in right.items()}
        if name == "trained":
            tested = torch.stack([found[count:].mean(0) for found in right.values()])  # (jobs, heads)
    table, per_layer = [], tested.shape[1] // len(model.stack.blocks)
    lead = {}
    for i, job in enumerate(JOBS):
        head, own = best["trained"][job]
        lead[job] = own - float(torch.cat([tested[:i, head], tested[i + 1 :, head]]).mean())
        table.append(
            {
                "job": job,
                "head": f"{head // per_layer}.{head % per_layer}",
                "right": own,
                "lead over other jobs": lead[job],
            }
            | {"mean head": float(tested[i].mean()), "best head of random weights": best["random weights"][job][1]}
        )
    different = len({head for head, _ in best["trained"].values()})
    checks = [
        *(Check(f"{row['job']}: the best head is right more often than the mean of all heads, by 0.3 or more",
                f"{row['right']:.2f} and {row['mean head']:.2f}", row["right"] >= row["mean head"] + 0.3)
          for row in table),
        *(Check(f"{row['job']}: and than the best head of random weights, by 0.15 or more",
                f"{row['best head of random weights']:.2f}",
                row["right"] >= row["best head of random weights"] + 0.15) for row in table),
        Check("at least four of the five best heads are different heads", str(different), different >= 4),
        Check("at least four of them are specialists, right on their own job more often than on the others by 0.3",
              ", ".join(f"{value:.2f}" for value in lead.values()), sum(value >= 0.3 for value in lead.values()) >= 4),
    ]  # fmt: skip
    bars = {label: [(i, float(row[key])) for i, row in enumerate(table)]
            for label, key in (("best head", "right"), ("mean head", "mean head"),
                               ("best of random weights", "best head of random weights"))}  # fmt: skip
    groups = ("previous", "determiner", "subject", "referent", "same kind")
    plots = [Plot("", "accuracy on sentences not used to choose", bars, "SmolLM2", groups=groups)]
    return Findings(table, checks, plots, "One model and made-up sentences; what a head is used for is not shown.")
