"""An encoder of its own helps where input and output are distinct; a decoder manages by concatenation.

Passages of two sentences of the small world have to be translated into its second language, or summarized: "take Tom
doll move Mary attic". For comparison, a task whose input and output are not distinct: the second sentence continues
the first. An encoder-decoder, of two layers each, reads the source from both sides and has weights for it; a decoder
of four layers, with equally many weights, reads source and target as one sequence. Both have learned positions, which
cross-attention needs, and RoPE. They see the same pairs in the same order, and only the target is predicted. Measured
on held-out passages: the loss and the accuracy of words, given the earlier ones, and in training the number of steps
until nine of ten words are right.

Vaswani et al. 2017; Liu et al. 2018. Wang et al. 2022 compare them at larger sizes.
"""

# ledger: encdec.edge

import torch
from torch import nn

from regard.data.batch import Batch
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import fit
from regard.labs.small_models import parameter_count
from regard.labs.world_pairs import END, START, TASKS, IdPair, concatenated, draw, read_passages, to_ids
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.stack import Repeat
from regard.objectives.base import LossFunction
from regard.objectives.next_token import next_token
from regard.objectives.translation import translation, translation_batch
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.cross_attention import CrossAttention
from regard.parts.feedforward import SwiGLU
from regard.parts.input import Tokens
from regard.parts.norm import RMSNorm
from regard.parts.position.learned import Learned
from regard.parts.position.rope import Rope

WIDTH, HEADS, ROWS, LEARNED, LONGEST = 64, 4, 16, 0.9, 64
KINDS = ("encoder-decoder", "decoder")
DISTINCT = TASKS[:2]


def run(bench: Bench) -> Findings:
    steps = bench.training(400, 2)
    train, held_out = (read_passages(split, bench.setting(n, 40)) for split, n in (("train", 3000), ("held-out", 400)))
    found: dict[tuple[str, str], dict[str, float]] = {}
    curves: dict[str, list[tuple[float, float]]] = {}
    for task in TASKS:
        pairs, tested, vocab = to_ids(train[task], held_out[task])
        tested = tested[: bench.setting(256, 8)]
        for kind in KINDS:
            model, history = train_model(bench, kind, task, pairs, vocab, steps)
            loss, share = measure(model, kind, tested)
            found[task, kind] = {"weights": parameter_count(model), "loss": loss, "accuracy": share,
                                 "steps": steps_to_learn(history)}  # fmt: skip
            if task in DISTINCT:
                curves[f"{task}, {kind}"] = smoothed(history, max(1, steps // 20))
    checks = []
    for task in DISTINCT:
        own, one = (found[task, kind] for kind in KINDS)
        checks += [
            Check(f"{task}: the encoder-decoder has a lower loss than the decoder, by 10 % or more",
                  f"{own['loss']:.3f} and {one['loss']:.3f}", own["loss"] <= 0.9 * one["loss"]),
            Check(f"{task}: it has learned it in fewer steps", f"{own['steps']:.0f} and {one['steps']:.0f}",
                  own["steps"] < one["steps"]),
            Check(f"{task}: the decoder manages: more than {LEARNED:g} of the words are right",
                  f"{one['accuracy']:.2f}", one["accuracy"] > LEARNED),
        ]  # fmt: skip
    own, one = (found[TASKS[2], kind]["loss"] for kind in KINDS)
    checks.append(Check(f"{TASKS[2]}: their losses differ by less than 2 %", f"{own:.3f} and {one:.3f}",
                        abs(own / one - 1) < 0.02))  # fmt: skip
    table = [{"task": task, "model": kind} | values for (task, kind), values in found.items()]
    bars = {kind: [(i, found[task, kind]["loss"]) for i, task in enumerate(TASKS)] for kind in KINDS}
    plots = [
        Plot("", "nats per word", bars, "held-out passages", groups=TASKS),
        Plot("steps", "words right in training", curves),
    ]
    return Findings(
        table,
        checks,
        plots,
        f"{steps} steps of {ROWS} pairs; one learning rate for both. Other positions change the result.",
    )


def train_model(
    bench: Bench, kind: str, task: str, pairs: list[IdPair], vocab: int, steps: int
) -> tuple[nn.Module, list[float]]:
    """The model, and its accuracy at each step."""
    torch.manual_seed(bench.seed)
    model = build(kind, vocab)
    objective: LossFunction = translation if kind == "encoder-decoder" else next_token
    label = f"{task}: {kind}"
    history = fit(bench, label, model, lambda rng: batch_of(kind, draw(rng, pairs, ROWS)), steps, objective=objective)
    return model, history["accuracy"]


def build(kind: str, vocab: int) -> nn.Module:
    own, cross = Sublayer(Attention(HEADS, position=Rope())), Sublayer(CrossAttention(HEADS))
    if kind == "decoder":
        wider = SwiGLU(2 * WIDTH + round(2 * WIDTH / 3))  # for the weights of the cross-attentions
        return Decoder(vocab, WIDTH, (Repeat((Block((own, Sublayer(wider))),), 4),), Learned(LONGEST)).build()
    feedforward = Sublayer(SwiGLU(2 * WIDTH))
    source = Encoder(Tokens(vocab), WIDTH, (Repeat((Block((own, feedforward)),), 2),), Learned(LONGEST), norm=RMSNorm())
    target = Decoder(vocab, WIDTH, (Repeat((Block((own, cross, feedforward)),), 2),), Learned(LONGEST))
    return EncoderDecoder(source, target, shared=True).build()


def batch_of(kind: str, pairs: list[IdPair]) -> Batch:
    if kind == "decoder":
        return concatenated(pairs)
    sources, targets = zip(*pairs, strict=True)
    return translation_batch(sources, targets, START, END)


@torch.no_grad()
def measure(model: nn.Module, kind: str, pairs: list[IdPair]) -> tuple[float, float]:
    """The loss and the accuracy per word of the targets."""
    objective = translation if kind == "encoder-decoder" else next_token
    loss, count, metrics = objective(model, batch_of(kind, pairs))
    return (loss / count).item(), (metrics["accuracy"] / count).item()


def smoothed(values: list[float], size: int) -> list[tuple[float, float]]:
    """Means of `size` steps each, by the last of these."""
    chunks = [values[i : i + size] for i in range(0, len(values) - size + 1, size)]
    return [(float((i + 1) * size), sum(chunk) / size) for i, chunk in enumerate(chunks)]


def steps_to_learn(accuracy: list[float]) -> float:
    """The first step after ten in which LEARNED of the words are right on average; the number of steps if none."""
    means = (sum(accuracy[i - 10 : i]) / 10 for i in range(10, len(accuracy) + 1))
    return next((float(i) for i, mean in enumerate(means, 10) if mean > LEARNED), float(len(accuracy)))
