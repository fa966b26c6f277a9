"""Spaces that some tokenizers leave before punctuation, taken out again where the folder asks for it.

`clean_up_tokenization_spaces` is a habit of WordPiece, whose pieces know no spaces; `transformers` obeys it for all but
byte-pair encodings. The replacements run one after the other over the whole text, so a stream may let text out only up
to where none of them can reach across.
"""

ATTACHED = {f" {end}": end for end in (".", "?", "!", ",")}
ATTACHED |= {" ' ": "'"} | {f" {end}": end for end in ("n't", "'m", "'s", "'ve", "'re")}
REACH = max(map(len, ATTACHED)) - 1  # characters after its space that a replacement looks at


def tidied(text: str) -> str:
    for spaced, attached in ATTACHED.items():
        text = text.replace(spaced, attached)
    return text


def settled(text: str) -> int:
    """Where the text can be cut so that both parts are tidied as they would be together: before a space after a word.

    All replacements begin with a space, so none that begins in the word or before it reaches as far.
    """
    at = text.rfind(" ")
    while at > 0 and " " in text[max(0, at - REACH) : at]:
        at = text.rfind(" ", 0, at)
    return max(at, 0)
