"""Next-token prediction over varied text teaches one decoder syntax, facts and rules, and several tasks as text.

A decoder of words is trained on lines of the small world in one mixture: sentences, statements of where people live,
and tasks as text to complete, which begin with a word for the task: "translate" a sentence into the second language,
"summarize" it as an event, and "ask" who, what or where. Every word of a line is predicted, and nothing but its words
tells the lines apart. Measured on held-out sentences. Syntax: is one more probable than with two neighbouring words
exchanged? Facts: where each person lives. Rules: translation, whose words follow from cases, tenses and agreement. Each
task is compared with a specialist: a decoder of the same size that is trained on lines of this task alone, on as many
of them in as many steps.

Radford et al. 2019; Raffel et al. 2020 (tasks as text). The tasks are generated and their lines are short.
"""

# ledger: dec.unify

import torch
from torch import Tensor

from regard.data.batch import Batch
from regard.data.world.english import PLACES, write_sentences
from regard.data.world.second_language import translate_sentence
from regard.data.world.tasks import OTHER_PEOPLE, draw_passages
from regard.labs.alignment import SentencePair, split_words
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import correct_tokens, fit, generator
from regard.labs.small_models import MIXERS, decoder_spec
from regard.labs.world_pairs import END, IdPair, concatenated, draw, to_ids
from regard.models.decoder import DecoderModule
from regard.objectives.base import layout_of

WIDTH, LAYERS, LEVEL = 64, 2, 1
ROWS = {"translate": 10, "summarize": 8, "ask": 8, "sentence": 4, "fact": 2}  # of a batch
TASKS = ("translate", "summarize", "ask")


def run(bench: Bench) -> Findings:
    steps = bench.training(600, 2)
    lines = {split: read_lines(split, bench.setting(count, 60), bench.seed)
             for split, count in (("train", 3000), ("held-out", 300))}  # fmt: skip
    every = [pair for pairs in lines["train"].values() for pair in pairs]
    _, _, vocab = to_ids(every, [])
    train, tested = ({kind: to_ids(every, pairs)[1] for kind, pairs in lines[split].items()} for split in lines)
    tested = {kind: pairs[: bench.setting(200, 8)] for kind, pairs in tested.items()}
    one = train_decoder(bench, "all", train, ROWS, vocab, steps)
    shares = {task: accuracy_of(one, tested[task]) for task in TASKS}
    alone = {}
    for task in TASKS:
        specialist = train_decoder(bench, task, train, {task: ROWS[task]}, vocab, steps)
        alone[task] = accuracy_of(specialist, tested[task])
    facts = accuracy_of(one, train["fact"])
    syntax = prefers_order(bench, one, tested["sentence"])
    torch.manual_seed(bench.seed)
    untrained = prefers_order(bench, build(vocab), tested["sentence"])
    checks = [
        *(Check(f"{task}: more than 0.9 of the words of answers about held-out text are right",
                f"{shares[task]:.2f}", shares[task] > 0.9) for task in TASKS),
        *(Check(f"{task}: as well as a specialist, within 0.05", f"{shares[task]:.2f} and {alone[task]:.2f}",
                shares[task] >= alone[task] - 0.05) for task in TASKS),
        Check("facts: more than 0.9 of the homes are known", f"{facts:.2f}", facts > 0.9),
        Check("syntax: more than 0.9 of the held-out sentences are more probable than with two words exchanged",
              f"{syntax:.2f}", syntax > 0.9),
        Check("an untrained decoder prefers them in at most 0.6 of the cases", f"{untrained:.2f}", untrained <= 0.6),
    ]  # fmt: skip
    table = [{"of": task, "one decoder": shares[task], "specialist": alone[task]} for task in TASKS]
    table += [
        {"of": "facts", "one decoder": facts, "specialist": ""},
        {"of": "syntax", "one decoder": syntax, "specialist": ""},
    ]
    bars = {"one decoder": list(enumerate((*shares.values(), facts, syntax))),
            "specialists": list(enumerate(alone.values()))}  # fmt: skip
    plots = [Plot("", "share that is right", bars, "held-out text, and facts", groups=(*TASKS, "facts", "syntax"))]
    remark = (
        f"{steps} steps of {sum(ROWS.values())} lines, and of as many as its share for a specialist; {WIDTH} channels."
    )
    return Findings(table, checks, plots, remark)


def read_lines(split: str, count: int, seed: int) -> dict[str, list[SentencePair]]:
    """The lines of each kind, as what is given and what has to be completed; each line once."""
    found: dict[str, dict[str, SentencePair]] = {kind: {} for kind in ROWS}

    def add(kind: str, source: list[str], target: list[str]) -> None:
        found[kind][" ".join([*source, "=", *target])] = (source, target)

    for i in range(count):
        (event,), rng = next(draw_passages(i, LEVEL, split, 1))
        words = split_words(*write_sentences([event], rng))
        add("translate", ["translate", *words], split_words(translate_sentence(" ".join(words) + ".")))
        add("summarize", ["summarize", *words], [name for name in event if name])
        add("sentence", ["sentence"], words)
        asked = rng.choice([name for name in ("who", "what", "where") if getattr(event, name)])
        add("ask", ["ask", *words, asked], [getattr(event, asked)])
    places = torch.randint(len(PLACES), (len(OTHER_PEOPLE),), generator=generator(seed)).tolist()
    for person, i in zip(OTHER_PEOPLE, places, strict=True):
        add("fact", [person, "lives", "in", "the"], [PLACES[i]])
    return {kind: list(pairs.values()) for kind, pairs in found.items()}


def build(vocab: int) -> DecoderModule:
    return decoder_spec(MIXERS["attention"], vocab, WIDTH, LAYERS).build()


def train_decoder(
    bench: Bench, label: str, lines: dict[str, list[IdPair]], rows: dict[str, int], vocab: int, steps: int
) -> DecoderModule:
    """A decoder that is trained on batches of these numbers of lines of each kind."""
    torch.manual_seed(bench.seed)
    model = build(vocab)

    def mixture(rng: torch.Generator) -> Batch:
        return concatenated([pair for kind, n in rows.items() for pair in draw(rng, lines[kind], n)], True)

    fit(bench, label, model, mixture, steps, 4e-3)
    return model


def accuracy_of(model: DecoderModule, pairs: list[IdPair]) -> float:
    """The share of the words of targets that are predicted, without the end."""
    batch = concatenated(pairs)
    ends = batch.targets == END
    correct, counted = correct_tokens(model, batch), (batch.weights > 0) & ~ends
    return correct[counted].float().mean().item()


@torch.no_grad()
def prefers_order(bench: Bench, model: DecoderModule, pairs: list[IdPair]) -> float:
    """The share of sentences that are more probable than with two neighbouring words exchanged, which differ."""
    rng, exchanged = generator(bench.seed), []
    for source, words in pairs:
        places = [i for i in range(len(words) - 1) if words[i] != words[i + 1]]
        i = places[int(torch.randint(len(places), (), generator=rng))]
        exchanged.append((source, [*words[:i], words[i + 1], words[i], *words[i + 2 :]]))
    first, second = (log_probabilities(model, concatenated(rows)) for rows in (pairs, exchanged))
    return (first > second).float().mean().item()


def log_probabilities(model: DecoderModule, batch: Batch) -> Tensor:
    """(B,) of the words with weight"""
    logits = model(batch.tokens, layout_of(batch))
    assert isinstance(logits, Tensor)
    found = logits.log_softmax(-1).gather(-1, batch.targets.unsqueeze(-1)).squeeze(-1)
    return (found * batch.weights).sum(1)
