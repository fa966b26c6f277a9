"""Subwords balance the size of the vocabulary against the length of the sequence; losses compare per byte only.

The Python manual is split into characters, byte-pair tokens of several vocabularies, and words. Measured on held-out
pages: the number of tokens per kilobyte and the share of unknown tokens. Decoders of one size, all trained on the same
number of tokens and thus with about the same work, then predict the held-out text; their losses are per token and per
byte. A vocabulary of words has as many entries as the largest one of byte pairs. It drops white space and maps all
other words to one unknown token: it loses text, so that its loss cannot be compared.

Sennrich et al. 2015.
"""

# ledger: tok.tradeoff

import re
from collections import Counter

import torch

from regard.data.sources.base import Examples
from regard.data.sources.files import Pydoc
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import fit
from regard.labs.mamba_language import draw_rows, held_out_loss
from regard.labs.small_models import small_decoder
from regard.text.train import bpe, character

ROWS, ROW, WIDTH = 16, 64, 64
SIZES = (512, 1024, 2048)


def run(bench: Bench) -> Findings:
    train, held_out = (text_of(examples, bench.setting(10_000, 4)) for examples in Pydoc().open(bench.seed))
    sizes = bench.setting(SIZES, SIZES[:2])
    tokenizers = {"characters": character([train, held_out])} | {f"bpe {n:,}": bpe([train], n) for n in sizes}
    table, size = [], len(held_out.encode())
    for name, tokenizer in tokenizers.items():
        ids, test = (torch.tensor(tokenizer.encode(text)) for text in (train, held_out))
        torch.manual_seed(bench.seed)
        model = small_decoder("attention", tokenizer.vocab_size, WIDTH)
        fit(bench, name, model, lambda rng, ids=ids: draw_rows(rng, ids, ROWS, ROW), bench.training(400, 2), 2e-3)
        loss = held_out_loss(model, test, bench.setting(64, 2), ROW)
        row = {"tokenizer": name, "vocabulary": tokenizer.vocab_size, "tokens per kB": 1000 * len(test) / size}
        table.append(row | {"unknown": 0.0, "nats per token": loss, "nats per byte": loss * len(test) / size})
    counts, words = Counter(split(train)), split(held_out)
    vocabulary = {word for word, _ in counts.most_common(sizes[-1] - 1)}
    unknown = sum(word not in vocabulary for word in words) / len(words)
    every_word = {"tokenizer": "words", "vocabulary": sizes[-1], "tokens per kB": 1000 * len(words) / size}
    table.append(every_word | {"unknown": unknown, "nats per token": "", "nats per byte": ""})

    lengths = [row["tokens per kB"] for row in table]
    by_token, by_byte = ({r["tokenizer"]: r[key] for r in table[:-1]} for key in ("nats per token", "nats per byte"))
    subwords = [list(losses.values())[1:] for losses in (by_token, by_byte)]
    checks = [
        Check("the larger the vocabulary, the fewer tokens: characters, then byte pairs by size, then words",
              " > ".join(f"{n:.0f}" for n in lengths), lengths == sorted(lengths, reverse=True)),
        Check("as many words as the largest byte-pair vocabulary leave more than 1 % of the text unknown",
              f"{unknown:.3f}", unknown > 0.01),
        Check("every byte-pair vocabulary has a lower loss per byte than characters",
              f"characters {by_byte['characters']:.3f}, worst of the others {max(subwords[1]):.3f}",
              by_byte["characters"] > max(subwords[1])),
        Check("losses per token have the opposite order: that of characters is the lowest",
              f"characters {by_token['characters']:.2f}, others from {min(subwords[0]):.2f} on",
              by_token["characters"] < min(subwords[0])),
    ]  # fmt: skip
    sequence = {"": [(row["vocabulary"], row["tokens per kB"]) for row in table[:-1]]}
    losses = {"": [(row["vocabulary"], row["nats per byte"]) for row in table[:-1]]}
    plots = [
        Plot("vocabulary", "tokens per kB", sequence, "characters and byte pairs", "x"),
        Plot("vocabulary", "nats per byte", losses, "held-out text", "x"),
    ]
    remark = "Longer tokens mean more bytes of text in the same number of tokens, and in the rows that a model reads."
    return Findings(table, checks, plots, remark)


def text_of(examples: Examples | None, limit: int) -> str:
    assert examples is not None and examples.count is not None
    return "\n".join(examples.example(index)["text"] for index in range(min(limit, examples.count)))


def split(text: str) -> list[str]:
    """Words and punctuation marks; white space is dropped."""
    return re.findall(r"\w+|[^\w\s]", text)
