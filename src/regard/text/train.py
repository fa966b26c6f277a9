"""Build tokenizers: bytes, characters, and byte-pair encoding.

Byte-pair encoding (Sennrich et al. 2016) starts from the 256 bytes and repeatedly merges the most frequent adjacent
pair of tokens. Byte and BPE tokenizers therefore round-trip every string. All three have the same special tokens and
chat template.
"""

from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from regard.text.chat import ASSISTANT, DEFAULT_TEMPLATE, END, PAD, SYSTEM, USER
from regard.text.tokenizer import Tokenizer

SPECIAL_TOKENS = [PAD, END, USER, ASSISTANT, SYSTEM]


def byte() -> Tokenizer:
    """One token per byte of UTF-8."""
    return bpe([], vocab=256 + len(SPECIAL_TOKENS))


def character(texts: Iterable[str]) -> Tokenizer:
    """One token per character that occurs in the texts. Encoding any other character is an error."""
    alphabet = sorted(set().union(*texts))
    vocab = {token: id for id, token in enumerate(SPECIAL_TOKENS + alphabet)}
    core = tokenizers.Tokenizer(models.WordLevel(vocab))
    core.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(SPECIAL_TOKENS)
    return Tokenizer(core, eos=END, pad=PAD, chat_template=DEFAULT_TEMPLATE)


def bpe(texts: Iterable[str], vocab: int) -> Tokenizer:
    """`vocab` counts all tokens: the special tokens, the 256 bytes and the merges learned from the texts."""
    minimum = 256 + len(SPECIAL_TOKENS)
    if vocab < minimum:
        raise ValueError(
            f"vocab={vocab} is less than the {minimum} bytes and special tokens; choose at least {minimum}"
        )
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(texts, trainer)
    return Tokenizer(core, eos=END, pad=PAD, chat_template=DEFAULT_TEMPLATE)
