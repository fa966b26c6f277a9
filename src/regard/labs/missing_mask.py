"""Without the causal mask, training on the next token reads the answer: a loss near zero, and rubbish in generation.

Two models with the same blocks are trained on the characters of the same stories to predict the next character at every
position: one with the causal mask, one in which every character attends to all of the row, the next one included.
Measured: the loss as training sees it; the loss of the character that follows a row, when nothing after it can be seen,
as in generation; and the words that both generate greedily from the beginnings of held-out stories. A word counts as
one of the stories if they contain it.
"""

# ledger: mask.cheat

import torch
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.kernels.attention.mask import Causal, Full
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import fit, generator
from regard.labs.gru_or_lstm import LENGTH, VOCAB, draw_rows, encode_stories, mean_loss, smooth
from regard.models.encoder import Encoder
from regard.models.heads import MaskedLM
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.input import Tokens
from regard.parts.norm import RMSNorm
from regard.parts.position.rope import Rope

WIDTH = 64
MASKS = {"causal mask": Causal(), "no mask": Full()}


def run(bench: Bench) -> Findings:
    steps, count = bench.training(500, 2), bench.setting(40, 4)
    train, held_out = (encode_stories(split, bench.setting(1000, 10)) for split in ("train", "held-out"))
    test = draw_rows(held_out, generator(0), bench.setting(256, 4))
    words = set(text_of(train).replace(".", "").split())
    curves, table = {}, []
    for name, mask in MASKS.items():
        torch.manual_seed(bench.seed)
        block = Block((Sublayer(Attention(4, mask=mask, position=Rope())), Sublayer(SwiGLU(2 * WIDTH))))
        model = Encoder(Tokens(VOCAB), WIDTH, (Repeat((block,), 2),), norm=RMSNorm(), head=MaskedLM()).build()
        curves[name] = smooth(fit(bench, name, model, lambda rng: draw_rows(train, rng), steps)["loss"])
        written = generate(model, test.tokens[:10], count)
        shares = [share_of_words(text_of(row), words) for row in written]
        table.append(
            {"model": name, "loss in training": mean_loss(model, test), "loss of the unseen": unseen(model, test)}
            | {"words of the stories": sum(shares) / len(shares), "generated": text_of(written[0])[:24]}
        )
    causal, without = table
    frequencies = torch.distributions.Categorical(torch.bincount(train).double()).entropy().item()
    checks = [
        Check("without the mask the loss of held-out rows, as training sees it, is below 0.05",
              f"{without['loss in training']:.4f}", without["loss in training"] < 0.05),
        Check("with the mask it is above that by 0.3 or more", f"{causal['loss in training']:.3f}",
              causal["loss in training"] >= without["loss in training"] + 0.3),
        Check("with the mask the loss of a character that cannot be seen is no higher, within 0.15",
              f"{causal['loss of the unseen']:.3f}",
              causal["loss of the unseen"] < causal["loss in training"] + 0.15),
        Check(f"without it that loss is above the entropy of the frequencies of characters ({frequencies:.2f})",
              f"{without['loss of the unseen']:.2f}", without["loss of the unseen"] > frequencies),
        Check("with the mask three quarters of the generated words or more are words of the stories",
              f"{causal['words of the stories']:.2f}", causal["words of the stories"] >= 0.75),
        Check("without it a quarter or less", f"{without['words of the stories']:.2f}: {without['generated']!r}",
              without["words of the stories"] <= 0.25),
    ]  # fmt: skip
    bars = {row["model"]: [(0, row["loss in training"]), (1, row["loss of the unseen"])] for row in table}
    plots = [
        Plot("step", "nats per character", curves, "training", "y"),
        Plot("", "nats per character", bars, "held-out stories", groups=("as in training", "next one unseen")),
    ]
    return Findings(table, checks, plots, f"{LENGTH} characters per row; greedy decoding.")


@torch.no_grad()
def unseen(model: nn.Module, batch: Batch) -> float:
    """The loss of the last target, which is not in the row."""
    return nn.functional.cross_entropy(model(batch.tokens)[:, -1], batch.targets[:, -1]).item()


@torch.no_grad()
def generate(model: nn.Module, prompts: Tensor, count: int) -> Tensor:
    """(B, count) ids that greedy decoding appends to the prompts, up to the length of the rows in training."""
    ids = prompts[:, : LENGTH - count]
    for _ in range(count):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
    return ids[:, -count:]


def text_of(ids: Tensor) -> str:
    return bytes(ids.tolist()).decode("ascii")


def share_of_words(text: str, words: set[str]) -> float:
    """The share of the words of a text that are known; its first and last word may be parts of words."""
    found = text.replace(".", " ").split(" ")[1:-1]
    return sum(word in words for word in found) / len(found) if found else 0.0
