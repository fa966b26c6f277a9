"""An encoder without positions trains and stays mediocre; a small decoder can infer order from its causal mask.

Encoders and decoders with and without positions (RoPE) on two tasks. Text: stories of the small world, where encoders
predict masked tokens and decoders the next one; much of it follows from which words occur, not from their order. Order:
the previous token of every token of a row of random symbols. Without positions an encoder has the same output for the
same token at any place, so it can do no better than the most common symbol that follows from the set of tokens; a
decoder's token attends to fewer keys the earlier it is, which tells its position.

Baselines: the most frequent token of the text, and the most common symbol of each row. Haviv et al. 2022; Kazemnejad et
al. 2023.
"""

# ledger: pos.silent
# ledger: pos.nope

import torch
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import MakeBatch, accuracy, fit, generator
from regard.labs.mamba_language import VOCAB, draw_rows, encode_stories
from regard.labs.position_models import decoder_with, encoder_with
from regard.labs.tasks import FIRST, draw_symbols, whole_rows
from regard.objectives.masked import masked
from regard.objectives.next_token import next_token

MASK, SYMBOLS, LENGTH = VOCAB, 16, 16
MODELS = {
    "encoder, RoPE": ("encoder", "RoPE"),
    "encoder, none": ("encoder", "none"),
    "decoder, RoPE": ("decoder", "RoPE"),
    "decoder, none": ("decoder", "none"),
}


def run(bench: Bench) -> Findings:
    steps, rows = bench.training(300, 2), bench.setting(16, 2)
    train, held_out = encode_stories(bench.setting(2000, 40), bench.setting(200, 20))
    found: dict[str, dict[str, float]] = {}
    for name, (kind, scheme) in MODELS.items():

        def text(rng: torch.Generator, ids: Tensor = train, rows: int = rows, kind: str = kind) -> Batch:
            return (mask_tokens if kind == "encoder" else draw_rows)(rng, ids, rows, 64)

        def order(rng: torch.Generator) -> Batch:
            return previous_tokens(rng, 2 * rows)

        on_text = train_model(bench, f"text: {name}", kind, scheme, text, steps)
        on_order = train_model(bench, f"order: {name}", kind, scheme, order, steps)
        found[name] = {
            "text": accuracy(on_text, text(generator(0), held_out, bench.setting(128, 2))),
            "order": accuracy(on_order, previous_tokens(generator(10_000 + bench.seed), bench.setting(512, 4))),
        }
    common = most_common_symbol(previous_tokens(generator(10_000 + bench.seed), bench.setting(512, 4)))
    frequent = (held_out == train.bincount().argmax()).float().mean().item()
    guess = {"text": frequent, "order": common}
    (encoder, blind), (decoder, unaided) = ([found[f"{kind}, {scheme}"] for scheme in ("RoPE", "none")]
                                            for kind in ("encoder", "decoder"))  # fmt: skip
    checks = [
        Check("text: the encoder without positions learns: it is above the most frequent token, by 0.1 or more",
              f"{blind['text']:.2f} and {guess['text']:.2f}", blind["text"] >= guess["text"] + 0.1),
        Check("text: it stays mediocre: 0.1 or more below the encoder with positions",
              f"{blind['text']:.2f} and {encoder['text']:.2f}", blind["text"] <= encoder["text"] - 0.1),
        Check("order: the encoder with positions learns the task, with an accuracy above 0.9",
              f"{encoder['order']:.2f}", encoder["order"] > 0.9),
        Check("order: without positions it is no more accurate than the row's most common symbol, within 0.05",
              f"{blind['order']:.2f} and {guess['order']:.2f}", blind["order"] <= guess["order"] + 0.05),
        Check("order: the decoder without positions learns the task, with an accuracy above 0.9",
              f"{unaided['order']:.2f}", unaided["order"] > 0.9),
        Check("text: the decoder without positions is as accurate as with them, within 0.05",
              f"{unaided['text']:.2f} and {decoder['text']:.2f}", unaided["text"] >= decoder["text"] - 0.05),
        Check("text: it is no better default: with positions the decoder is more accurate",
              f"{unaided['text']:.2f} and {decoder['text']:.2f}", decoder["text"] > unaided["text"]),
    ]  # fmt: skip
    rows_of = found | {"guessing": guess}
    bars = {task: [(i, values[task]) for i, values in enumerate(rows_of.values())] for task in guess}
    groups = tuple(name.replace(", ", "\n") for name in rows_of)
    plots = [Plot("", "accuracy", bars, "with and without positions", groups=groups)]
    table = [{"model": name} | values for name, values in rows_of.items()]
    return Findings(table, checks, plots, f"Each model took {steps:,} steps.")


def train_model(bench: Bench, label: str, kind: str, scheme: str, make_batch: MakeBatch, steps: int) -> nn.Module:
    torch.manual_seed(bench.seed)
    build = encoder_with if kind == "encoder" else decoder_with
    model = build(scheme, VOCAB + 1, 2, 64)
    fit(bench, label, model, make_batch, steps, 4e-3, objective=masked if kind == "encoder" else next_token)
    return model


def mask_tokens(rng: torch.Generator, ids: Tensor, rows: int, length: int) -> Batch:
    """A seventh of the tokens is replaced by MASK and has to be predicted."""
    tokens = draw_rows(rng, ids, rows, length).tokens
    chosen = torch.rand(tokens.shape, generator=rng) < 1 / 7
    return whole_rows(tokens.masked_fill(chosen, MASK), tokens, chosen)


def previous_tokens(rng: torch.Generator, rows: int) -> Batch:
    tokens = draw_symbols(rng, SYMBOLS, rows, LENGTH)
    weights = torch.ones_like(tokens)
    weights[:, 0] = 0
    return whole_rows(tokens, tokens.roll(1, 1), weights)


def most_common_symbol(batch: Batch) -> float:
    """The accuracy of predicting the row's most common symbol everywhere."""
    counts = torch.nn.functional.one_hot(batch.tokens, FIRST + SYMBOLS).sum(1)  # (B, symbols)
    return (batch.targets == counts.argmax(-1, keepdim=True))[batch.weights > 0].float().mean().item()
