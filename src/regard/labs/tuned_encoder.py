"""Given labels, a small tuned encoder beats a prompted language model in accuracy, cost and latency.

Which kind of event is the second sentence of a passage of the small world about: moving, taking, giving, dropping, …?
An encoder of words with two layers is trained from nothing on 16 to 1,024 passages with labels. SmolLM2, with 135M
weights, gets a prompt with one passage and label of each kind, and answers with the kind whose word has the largest
logit; or only the words with their meanings. The better prompt counts. Its keys and values are cached. Cost: weights,
and processor time of one passage at a time, the training of the encoder apart.

Devlin et al. 2018; Bucher & Martini 2024. A larger model has a better prompted accuracy, and a larger cost.
"""

# ledger: enc.cheap

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from regard.data.batch import Batch
from regard.data.packing import pad_items
from regard.data.world.tasks import example
from regard.engine.stores.contiguous import Contiguous
from regard.labs.alignment import split_words
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import fit
from regard.labs.small_models import mixer_block, parameter_count
from regard.labs.trained_model import EncodeText, load_trained
from regard.layout import TokenLayout
from regard.models.decoder import DecoderModule
from regard.models.encoder import Encoder, EncoderModule
from regard.models.heads import Classification
from regard.models.stack import Repeat
from regard.objectives.classification import classification
from regard.parts.attention import Attention
from regard.parts.input import Tokens
from regard.parts.norm import RMSNorm
from regard.parts.position.rope import Rope

LABELS = ("be", "lie", "move", "take", "give", "drop", "put", "pull")
WORDS = ("be", "lie", "move", "take", "give", "drop", "insert", "remove")  # with different first tokens
MEANINGS = (
    "a person is somewhere", "a thing is somewhere", "a person goes somewhere", "a person takes a thing",
    "a person gives a thing to somebody", "a person drops a thing", "a person puts a thing into a container",
    "a person takes a thing out of a container",
)  # fmt: skip
TASK = "Which action is the second sentence of each passage about? Answer with one word of: {}.\n\n"
WIDTH, LEVEL, UNKNOWN = 64, 2, 0
Passage = tuple[str, int]


def run(bench: Bench) -> Findings:
    counts = bench.setting((16, 128, 1024), (16, 32))
    first = bench.seed * 10_000
    train = [passage(first + i, "train") for i in range(counts[-1])]
    held_out = [passage(first + i, "held-out") for i in range(bench.setting(64, 8))]
    tuned: dict[int, tuple[float, float, int]] = {}
    for count in counts:
        tuned[count] = tune(bench, train[:count], held_out)
    model, encode = load_trained(bench)
    prompted = {name: ask_all(model, encode, prompt, held_out) for name, prompt in prompts(bench.seed).items()}
    common = max(sum(label == i for _, label in held_out) for i in range(len(LABELS))) / len(held_out)
    share, seconds, weights = tuned[counts[-1]]
    best, slow = max(prompted.values())
    few = tuned[counts[0]][0]
    ratio = parameter_count(model) / weights
    checks = [
        Check("the prompted model understands the task: above the most common kind, by 0.1 or more",
              f"{best:.2f} and {common:.2f}", best >= common + 0.1),
        Check(f"given {counts[-1]:,} labels the encoder is right more often than the prompted model, by 0.05 or more",
              f"{share:.2f} and {best:.2f}", share >= best + 0.05),
        Check(f"given {counts[0]} labels it is not", f"{few:.2f} and {best:.2f}", few < best + 0.05),
        Check("it has fewer weights by a factor of 100 or more", f"{ratio:,.0f}", ratio >= 100),
        Check("it takes at most a tenth of the time for a passage", f"{1000 * seconds:.1f} and {1000 * slow:.0f} ms",
              seconds <= slow / 10),
    ]  # fmt: skip
    table = [
        {"model": f"encoder, {count:,} labels", "accuracy": found[0], "weights": found[2], "ms": 1000 * found[1]}
        for count, found in tuned.items()
    ] + [
        {"model": f"SmolLM2, {name}", "accuracy": found[0], "weights": parameter_count(model), "ms": 1000 * found[1]}
        for name, found in prompted.items()
    ]
    lines = {"tuned encoder": [(float(count), found[0]) for count, found in tuned.items()]}
    for name, found in prompted.items():
        lines[f"prompted, {name}"] = [(float(count), found[0]) for count in counts]
    lines["most common kind"] = [(float(count), common) for count in counts]
    times = [seconds, *(found[1] for found in prompted.values())]
    groups = ("encoder", *(f"prompted,\n{name}" for name in prompted))
    plots = [
        Plot("labels", "accuracy", lines, f"{len(held_out)} held-out passages", "x"),
        Plot("", "ms", {"": [(i, 1000 * value) for i, value in enumerate(times)]}, "one passage", "y", groups),
    ]
    remark = "The passages are generated from few wordings, which favours training; a prompt needs no labels."
    return Findings(table, checks, plots, remark)


def passage(seed: int, split: str) -> Passage:
    """The text, and the index of its label."""
    found = example("event_kind", seed, LEVEL, split)
    return found["text"], LABELS.index(found["label"])


def tune(bench: Bench, train: list[Passage], held_out: list[Passage]) -> tuple[float, float, int]:
    """Accuracy, seconds of a passage, and weights of an encoder that is trained on these passages."""
    words = sorted({word for text, _ in train for word in split_words(text)})
    ids = {word: UNKNOWN + 1 + i for i, word in enumerate(words)}
    torch.manual_seed(bench.seed)
    layers = (Repeat((mixer_block(Attention(4, position=Rope()), WIDTH),), 2),)
    head = Classification(len(LABELS), "mean")
    model = Encoder(Tokens(len(words) + 1), WIDTH, layers, norm=RMSNorm(), head=head).build()

    def draw(rng: torch.Generator) -> Batch:
        return batch_of([train[i] for i in torch.randint(len(train), (32,), generator=rng).tolist()], ids)

    fit(bench, f"{len(train):,} labels", model, draw, bench.training(150, 2), 2e-3, objective=classification)
    return *measure(lambda text: classify(model, text, ids), held_out), parameter_count(model)


def batch_of(passages: list[Passage], ids: dict[str, int]) -> Batch:
    items = [{"ids": np.array([ids.get(word, UNKNOWN) for word in split_words(text)])} for text, _ in passages]
    tokens, valid = pad_items(items, "ids")
    return Batch(tokens=tokens, valid=valid, labels=torch.tensor([label for _, label in passages]))


@torch.inference_mode()
def classify(model: EncoderModule, text: str, ids: dict[str, int]) -> int:
    logits = model(torch.tensor([[ids.get(word, UNKNOWN) for word in split_words(text)]]))
    assert isinstance(logits, Tensor)
    return int(logits.argmax())


def measure(answer: Callable[[str], int], passages: list[Passage]) -> tuple[float, float]:
    """The share of right answers, and the median seconds of one."""
    right, seconds = 0, []
    for text, label in passages:
        start = time.process_time()
        right += answer(text) == label
        seconds.append(time.process_time() - start)
    return right / len(passages), statistics.median(seconds)


def prompts(seed: int) -> dict[str, str]:
    """The task alone, and with one passage of each kind, in random order."""
    task, shown = (
        TASK.format(", ".join(f"{word} ({meaning})" for word, meaning in zip(WORDS, MEANINGS, strict=True))),
        "",
    )
    order = torch.randperm(len(LABELS), generator=torch.Generator().manual_seed(seed)).tolist()
    for kind in order:
        seeds = range(900_000 + seed * 1000, 1_000_000)
        text = next(text for text, label in (passage(i, "train") for i in seeds) if label == kind)
        shown += question(text) + f" {WORDS[kind]}\n\n"
    return {"no examples": task, "one of each": task + shown}


def question(text: str) -> str:
    return f"Passage: {text}\nAction:"


@torch.inference_mode()
def ask_all(model: DecoderModule, encode: EncodeText, prompt: str, passages: list[Passage]) -> tuple[float, float]:
    """The accuracy and the seconds of a passage, with the keys and values of the prompt in a cache."""
    words = [encode(f" {word}")[0] for word in WORDS]
    prefix = encode(prompt)
    longest = max(len(encode(question(text))) for text, _ in passages)
    store = Contiguous(model.spec.memory(), 1, len(prefix) + longest, torch.float32, "cpu")

    def forward(ids: list[int], start: int) -> Tensor:
        layout = TokenLayout(torch.arange(start, start + len(ids)).unsqueeze(0))
        logits = model(torch.tensor([ids]), layout, store.begin_forward(layout))
        assert isinstance(logits, Tensor)
        return logits[0, -1]

    forward(prefix, 0)
    return measure(lambda text: int(forward(encode(question(text)), len(prefix))[words].argmax()), passages)
