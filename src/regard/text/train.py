"""Making tokenizers: bytes, characters, and byte-pair encoding.

Byte-pair encoding (Sennrich et al. 2016) starts from the 256 bytes and joins, over and over, the most frequent
neighbours; bytes and BPE therefore round-trip every text. All three share the same markers, so any of them can hold a
conversation.
"""

from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from regard.text.chat import ASSISTANT, DEFAULT_TEMPLATE, END, PAD, SYSTEM, USER
from regard.text.tokenizer import Tokenizer

MARKERS = [PAD, END, USER, ASSISTANT, SYSTEM]


def byte() -> Tokenizer:
    """One token per byte of UTF-8."""
    return bpe([], vocab=256 + len(MARKERS))


def character(texts: Iterable[str]) -> Tokenizer:
    """One token per character that occurs in the texts. Encoding any other character is an error."""
    alphabet = sorted(set().union(*texts))
    vocab = {piece: id for id, piece in enumerate(MARKERS + alphabet)}
    core = tokenizers.Tokenizer(models.WordLevel(vocab))
    core.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(MARKERS)
    return Tokenizer(core, eos=END, pad=PAD, chat_template=DEFAULT_TEMPLATE)


def bpe(texts: Iterable[str], vocab: int) -> Tokenizer:
    """`vocab` counts everything: markers, the 256 bytes, and the joins learned from the texts."""
    least = 256 + len(MARKERS)
    if vocab < least:
        raise ValueError(f"vocab={vocab} is too small; markers and bytes alone are {least}")
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=MARKERS, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(texts, trainer)
    return Tokenizer(core, eos=END, pad=PAD, chat_template=DEFAULT_TEMPLATE)
