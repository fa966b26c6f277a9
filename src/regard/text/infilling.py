"""Fill-in-the-middle: the ids from which a model generates the text between two others. Bavarian et al. 2022

    PREFIX text before SUFFIX text after MIDDLE  →  text between, then a stop token

The three tokens differ by family. A model was trained to infill if its vocabulary has all three of one family.
"""

from typing import NamedTuple

from regard.text.chat import encode_part
from regard.text.tokenizer import Tokenizer

TOKENS = (  # prefix, suffix, middle
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
)
# With one of these a model ends the text between, or goes on to another file.
ENDS = ("▁<EOT>", "<|endoftext|>", "<|file_separator|>", "<|file_sep|>", "<file_sep>")


class InfillingTokens(NamedTuple):
    prefix: int
    suffix: int
    middle: int
    stop_ids: tuple[int, ...]


def infilling_tokens(tokenizer: Tokenizer) -> InfillingTokens | None:
    """None: the model was not trained to infill."""
    find = tokenizer.core.token_to_id
    ends = [id for token in ENDS if (id := find(token)) is not None]
    for prefix, suffix, middle in (map(find, tokens) for tokens in TOKENS):
        if prefix is not None and suffix is not None and middle is not None:
            return InfillingTokens(prefix, suffix, middle, tuple(ends))
    return None


def encode_infilling(tokenizer: Tokenizer, tokens: InfillingTokens, before: str, after: str) -> list[int]:
    """The ids after which the model generates the text between `before` and `after`."""
    start = [*tokenizer.prefix_ids, tokens.prefix, *tokenizer.encode(before)]
    # `after` does not begin a text, so it has not the space that SentencePiece adds there.
    return [*start, tokens.suffix, *encode_part(tokenizer, after, special=False, first=False), tokens.middle]
