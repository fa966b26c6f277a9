"""The words and the sentences that the tokens of a text belong to.

Borders are found in the text, not in the tokens, so they are the same for every kind of tokenizer. A word is a run of
letters and digits; a punctuation mark and a CJK character are words of their own, as in BERT. White space belongs to
the following word. A sentence ends after `.`, `!` or `?` and white space, or at the end of a line.
"""

import re

import numpy as np

from regard.text.tokenizer import Tokenizer

CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002fa1f"
WORD = re.compile(rf"[{CJK}]|[^\W{CJK}]+|[^\w\s]")
SENTENCE = re.compile(r"(?:[^.!?\n]|[.!?](?!\s))*(?:[.!?]+(?=\s)|\n|$)")


def encode_words(tokenizer: Tokenizer, text: str) -> tuple[np.ndarray, np.ndarray]:
    """The ids of a text, and the number of the word of each; pieces of one word have the same number."""
    return encode_runs(tokenizer, text, [match.start() for match in WORD.finditer(text)])


def encode_sentences(tokenizer: Tokenizer, text: str) -> tuple[np.ndarray, np.ndarray]:
    """The ids of a text, and the number of the sentence of each."""
    return encode_runs(tokenizer, text, [start for start, _ in sentence_spans(text)])


def split_sentences(text: str) -> list[str]:
    return [text[start:end].strip() for start, end in sentence_spans(text)]


def sentence_spans(text: str) -> list[tuple[int, int]]:
    """Start and end of every sentence that is not only white space; the start is its first visible character."""
    spans = []
    for match in SENTENCE.finditer(text):
        visible = match.group().lstrip()
        if visible:
            spans.append((match.end() - len(visible), match.end()))
    return spans


def encode_runs(tokenizer: Tokenizer, text: str, borders: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The ids of a text, and for each the number of borders up to its first visible character."""
    ids, starts = tokenizer.encode_with_starts(text)
    visible = np.array([not character.isspace() for character in text] + [True])
    first_visible = np.minimum.accumulate(np.where(visible, np.arange(len(visible)), len(text))[::-1])[::-1]
    runs = np.searchsorted(np.array(borders, np.int64), first_visible[np.array(starts, np.int64)], side="right")
    return np.array(ids, np.int64), runs.astype(np.int64)
