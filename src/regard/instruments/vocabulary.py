"""Tokens and their vectors: how a text is split, and where the embeddings of a model lie."""

from functools import cache
from weakref import WeakKeyDictionary

import torch
from tokenizers import pre_tokenizers
from torch import Tensor

from regard.instruments.examples import START, example_subject, ids
from regard.instruments.instrument import Instrument, Panel, Quiz, Selection, Slider, Subject, TextField
from regard.instruments.panels import bars, heatmap, numbers, scatter, tokens
from regard.models.decoder import DecoderModule
from regard.text.tokenizer import Tokenizer
from regard.text.train import bpe, byte, character

MAX_TOKENS = 24
SAMPLE = "The lamp lights the old room. The boat carries a small stone, and the cook bakes bread. " * 4


EXAMPLE, SERVED = "example model", "served model"
OF = Selection("of", "model", (EXAMPLE, SERVED), EXAMPLE)


def read(subject: Subject | None, of: str, text: str) -> tuple[Subject, list[int], list[str]]:
    """The chosen model, the ids of the text and their strings; the vocabulary of the example model is a few words."""
    if of == EXAMPLE:
        subject = example_subject()
        encoded = ids([START, *text.lower().split()])
    elif subject is None:
        raise ValueError("no decoder is served that instruments can read; choose the example model")
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
            raise ValueError("no decoder is served whose tokenizer could be used; choose another split")
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
    # without a vocabulary there is no decode: the pieces themselves are joined
    rejoined = tokenizer_of(text, by, subject).decode([int(note) for note in notes]) if notes else "".join(pieces)
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
                "put back together": "exactly" if rejoined == text else f"“{rejoined}”",
            }
        ),
    ]


NORMS: WeakKeyDictionary[DecoderModule, Tensor] = WeakKeyDictionary()  # of the rows of the embedding table


@torch.no_grad()
def cosines(model: DecoderModule, chosen: int) -> Tensor:
    """(V,) of one row of the table with all; the table itself is not copied, it can have gigabytes."""
    weight = model.embedding.weight
    if model not in NORMS:
        NORMS[model] = torch.linalg.vector_norm(weight, dim=-1, dtype=torch.float32).clamp_min(1e-12)
    products = (weight @ weight[chosen]).float()
    return (products / (NORMS[model] * NORMS[model][chosen])).cpu()


@torch.no_grad()
def embeddings(subject: Subject | None, of: str, word: str, count: int) -> list[Panel]:
    subject, encoded, pieces = read(subject, of, word)
    weight, chosen = subject.model.embedding.weight, encoded[-1]
    near = cosines(subject.model, chosen).topk(min(count + 1, len(weight)))
    whole = len(weight) <= 64
    listed = list(range(len(weight)))[2:] if whole else near.indices.tolist()
    rows = weight[listed].double().cpu()
    points = rows - rows.mean(0)
    plane = points @ torch.linalg.svd(points, full_matrices=False)[2][:2].T
    names = [subject.tokenizer.decode_token(id) for id in listed]
    groups = ["chosen" if id == chosen else "near" if id in near.indices else "other" for id in listed]
    row = weight[chosen].float().cpu()
    columns = min(16, len(row))
    return [
        scatter(
            f"embeddings in the plane of the largest variance of {'all words' if whole else 'the neighbours alone'}",
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
            "Characters, bytes and byte pairs, which keep the spaces: decode(encode(x)) = x. Words that are split at "
            "spaces lose them.",
            {"by": "byte pairs"},
        ),
        tokenization, ("text/train.py", "text/tokenizer.py"), reads_model=True,
    ),
    Instrument(
        "embeddings", "Embeddings",
        "Each id selects a row of a trained table; words that are used alike end up close together.",
        r"x_t = E[\,\mathrm{id}_t\,], \qquad \cos(a, b) = \frac{a \cdot b}{|a|\,|b|}",
        (OF, TextField("word", "word", "lamp"), Slider("count", "neighbours", 1, 12, 6)),
        Quiz(
            "Which words are near an adjective in the example model?",
            "Other adjectives: the five nearest rows of “old” are the five others, which occur in the same places.",
            {"of": EXAMPLE, "word": "old", "count": 5},
        ),
        embeddings, ("models/decoder.py",), reads_model=True,
    ),
)  # fmt: skip
