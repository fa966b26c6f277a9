"""Build tokenizers: bytes, characters, and byte-pair encoding.

Byte-pair encoding (Sennrich et al. 2016) starts from the 256 bytes and repeatedly merges the most frequent adjacent
pair of tokens. Byte and BPE tokenizers therefore round-trip every string. All three have the same special tokens and
chat template. An objective may need more special tokens, such as [MASK]. With [CLS] and [SEP], sequences are encoded as
[CLS] a [SEP], and pairs as [CLS] a [SEP] b [SEP].
"""

from collections.abc import Iterable, Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from regard.text.chat import ASSISTANT, DEFAULT_TEMPLATE, END, PAD, SYSTEM, USER
from regard.text.tokenizer import Tokenizer

SPECIAL_TOKENS = [PAD, END, USER, ASSISTANT, SYSTEM]
MASK, CLS, SEP = "[MASK]", "[CLS]", "[SEP]"


def byte(special_tokens: Sequence[str] = ()) -> Tokenizer:
    """One token per byte of UTF-8. `special_tokens` are added to SPECIAL_TOKENS."""
    return bpe([], 256 + len(SPECIAL_TOKENS) + len(special_tokens), special_tokens)


def character(texts: Iterable[str], special_tokens: Sequence[str] = ()) -> Tokenizer:
    """One token per character that occurs in the texts. Encoding any other character is an error."""
    special = [*SPECIAL_TOKENS, *special_tokens]
    alphabet: set[str] = set()
    for text in texts:  # not `union(*texts)`, which would hold all of them in memory
        alphabet.update(text)
    vocab = {token: id for id, token in enumerate(special + sorted(alphabet))}
    core = tokenizers.Tokenizer(models.WordLevel(vocab))
    core.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(special)
    return with_special_tokens(core, special_tokens)


def bpe(texts: Iterable[str], vocab: int, special_tokens: Sequence[str] = (), single_digits: bool = False) -> Tokenizer:
    """`vocab` counts all tokens: the special tokens, the 256 bytes and the merges learned from the texts.

    single_digits: every digit is a token, as in Llama and Qwen2, so that a number has the same tokens everywhere.
    """
    special = [*SPECIAL_TOKENS, *special_tokens]
    minimum = 256 + len(special)
    if vocab < minimum:
        raise ValueError(
            f"vocab={vocab} is less than the {minimum} bytes and special tokens; choose at least {minimum}"
        )
    core = tokenizers.Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    core.pre_tokenizer = pre_tokenizers.Sequence([digits, words]) if single_digits else words
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(texts, trainer)
    return with_special_tokens(core, special_tokens)


def with_special_tokens(core: tokenizers.Tokenizer, special_tokens: Sequence[str]) -> Tokenizer:
    if CLS in special_tokens and SEP in special_tokens:
        ids = [(token, core.token_to_id(token)) for token in (CLS, SEP)]
        core.post_processor = processors.TemplateProcessing(
            single=f"{CLS} $A {SEP}", pair=f"{CLS} $A {SEP} $B:1 {SEP}:1", special_tokens=ids
        )
    names = {"mask_token": MASK, "cls_token": CLS, "sep_token": SEP}
    named = {name: token for name, token in names.items() if token in special_tokens}
    return Tokenizer(core, eos=END, pad=PAD, chat_template=DEFAULT_TEMPLATE, special_tokens_map=named)
