"""Tokens and their vectors: how a text is split, and where the embeddings of a model lie."""

from functools import cache

import torch
from tokenizers import pre_tokenizers

from regard.instruments.examples import START, example_subject, ids
from regard.instruments.instrument import Instrument, Panel, Quiz, Selection, Slider, Subject, TextField
from regard.instruments.panels import bars, heatmap, numbers, scatter, tokens
from regard.text.tokenizer import Tokenizer
from regard.text.train import bpe, byte, character

MAX_TOKENS = 24
SAMPLE = "The lamp lights the old room. The boat carries a small stone, and the cook bakes bread. " * 4


def read(subject: Subject | None, text: str) -> tuple[Subject, list[int], list[str]]:
    """The model, the ids of the text and their strings; the example model knows a few words only."""
    if subject is None:
        subject = example_subject()
        encoded = ids([START, *text.lower().split()])
    else:
        encoded = subject.tokenizer.encode_with_special_tokens(text)
    if not 1 <= len(encoded) <= MAX_TOKENS:
        raise ValueError(f"the text has {len(encoded)} tokens; write 1 to {MAX_TOKENS}")
    return subject, encoded, [subject.tokenizer.decode_token(id) for id in encoded]


def split_text(text: str, by: str, subject: Subject | None) -> tuple[list[str], list[str]]:
    """Pieces of the text and a note for each, the id if a vocabulary is used."""
    if by in ("words", "words and punctuation"):
        splitter = pre_tokenizers.WhitespaceSplit() if by == "words" else pre_tokenizers.Whitespace()
        return [piece for piece, _ in splitter.pre_tokenize_str(text)], []
    tokenizer = tokenizer_of(text, by, subject)
    encoded = tokenizer.encode(text)
    return [tokenizer.decode_token(id) for id in encoded], [str(id) for id in encoded]


def tokenizer_of(text: str, by: str, subject: Subject | None) -> Tokenizer:
    if by == "the served model":
        if subject is None:
            raise ValueError("no model is served whose tokenizer could be used; choose another one")
        return subject.tokenizer
    return character([SAMPLE, text]) if by == "characters" else trained_tokenizer(by == "bytes")


@cache
def trained_tokenizer(bytes_only: bool) -> Tokenizer:
    return byte() if bytes_only else bpe([SAMPLE], 340)


SPLITS = ("words", "words and punctuation", "characters", "bytes", "byte pairs", "the served model")


def tokenization(subject: Subject | None, text: str, by: str) -> list[Panel]:
    if not text.strip():
        raise ValueError("the text has only spaces; write a word")
    pieces, notes = split_text(text, by, subject)
    compared = [name for name in SPLITS if name != "the served model" or subject is not None]
    counts = [(name, float(len(split_text(text, name, subject)[0]))) for name in compared]
    size = len(text.encode("utf-8", "replace"))
    return [
        tokens("pieces; ids below them", pieces, [0.25 * (i % 2) for i in range(len(pieces))], notes or None),
        bars("number of pieces", counts),
        numbers(
            {
                "pieces": len(pieces),
                "characters": len(text),
                "characters without spaces": len("".join(text.split())),
                "bytes": size,
                "bytes per piece": size / len(pieces),
            }
        ),
    ]


def embeddings(subject: Subject | None, word: str, count: int) -> list[Panel]:
    subject, encoded, pieces = read(subject, word)
    weight = subject.model.embedding.weight.detach().float().cpu()
    chosen = encoded[-1]
    unit = torch.nn.functional.normalize(weight, dim=-1)
    near = (unit @ unit[chosen]).topk(min(count + 1, len(unit)))
    listed = list(range(len(weight)))[2:] if len(weight) <= 64 else near.indices.tolist()
    points = (weight[listed] - weight[listed].mean(0)).double()
    plane = points @ torch.linalg.svd(points, full_matrices=False)[2][:2].T
    names = [subject.tokenizer.decode_token(id) for id in listed]
    groups = ["chosen" if id == chosen else "near" if id in near.indices else "other" for id in listed]
    row = weight[chosen]
    columns = min(16, len(row))
    return [
        scatter(
            "embeddings in the plane of their largest variance",
            [(x, y, n) for (x, y), n in zip(plane.tolist(), names, strict=True)],
            groups,
        ),
        bars(
            f"nearest to “{pieces[-1]}”, by cosine",
            [
                (subject.tokenizer.decode_token(i), v)
                for v, i in zip(near.values.tolist(), near.indices.tolist(), strict=True)
                if i != chosen
            ],
        ),
        heatmap(
            f"row {chosen} of the table, first {columns} numbers",
            row[None, :columns],
            [pieces[-1]],
            range(1, columns + 1),
            "signed",
        ),
        numbers({"model": subject.name, "rows": weight.shape[0], "columns": weight.shape[1]}),
    ]


INSTRUMENTS = (
    Instrument(
        "tokens", "Splitting a text",
        "Words are few and open-ended, characters many; byte pairs are in between and can write every text.",
        r"\text{text} \;\longrightarrow\; (x_1, \dots, x_n), \quad x_i \in \{0, \dots, V-1\}",
        (
            TextField("text", "text", "The cook bakes unusual breads!"),
            Selection("by", "split into", SPLITS, "byte pairs"),
        ),
        Quiz(
            "Which splits can be put back together exactly?",
            "Characters, bytes and byte pairs, which keep the spaces. Words that are split at spaces lose them.",
            {"by": "characters"},
        ),
        tokenization, ("text/train.py", "text/tokenizer.py"), reads_model=True,
    ),
    Instrument(
        "embeddings", "Embeddings",
        "Each id selects a row of a trained table; words that are used alike end up close together.",
        r"x_t = E[\,\mathrm{id}_t\,], \qquad \cos(a, b) = \frac{a \cdot b}{|a|\,|b|}",
        (TextField("word", "word", "lamp"), Slider("count", "neighbours", 1, 12, 6)),
        Quiz(
            "Which words are near an adjective in the example model?",
            "Other adjectives: they occur in the same places, and only their use was learned.",
            {"word": "old"},
        ),
        embeddings, ("models/decoder.py",), reads_model=True,
    ),
)  # fmt: skip
