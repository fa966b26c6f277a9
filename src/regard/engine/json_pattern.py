"""Rewrite a regular expression for the text between the quotes of a JSON string.

A quote, a backslash or a control character cannot stand there as such. Classes of characters are narrowed to exclude
them, so that `.` and `[^,]` are possible in a `pattern`; as literals they are refused. All strings that match the
rewritten expression match the original one.
"""

import re

PIECE = re.compile(
    r"""\\x(?P<x>[0-9a-fA-F]{2}) | \\u(?P<u>[0-9a-fA-F]{4}) | \\(?P<escaped>.)
    | \[(?P<class>\^?(?:\\.|[^\]\\])+)\] | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
MEMBER = re.compile(r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\(.)|(.)", re.DOTALL)
LAST = 0x10FFFF
Ranges = list[tuple[int, int]]  # inclusive
UNQUOTED: Ranges = [(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)]  # need an escape in JSON
DIGITS: Ranges = [(0x30, 0x39)]
WORDS: Ranges = [*DIGITS, (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
SPACES: Ranges = [(9, 13), (0x20, 0x20)]
CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0}


def json_pattern(pattern: str) -> str:
    """The expression with narrowed classes. ValueError if it has a literal that JSON escapes."""
    pieces = []
    for piece in PIECE.finditer(pattern):
        found = piece.groupdict()
        code = found["x"] or found["u"]
        if found["class"]:
            negated = found["class"].startswith("^")
            ranges = class_ranges(found["class"].removeprefix("^"), pattern)
            pieces.append(write_class(complement(ranges) if negated else ranges, pattern))
        elif piece[0] == ".":
            pieces.append(write_class(complement([(10, 10)]), pattern))
        elif found["escaped"] and (ranges := category(found["escaped"])):
            pieces.append(write_class(ranges, pattern))
        else:
            literal = int(code, 16) if code else CONTROLS.get(found["escaped"] or "", ord(piece[0][-1]))
            if any(low <= literal <= high for low, high in UNQUOTED):
                raise ValueError(f"pattern={pattern!r} has {chr(literal)!r}, which is escaped in JSON; remove it")
            pieces.append(piece[0])
    return "".join(pieces)


def category(letter: str) -> Ranges | None:
    ranges = {"d": DIGITS, "w": WORDS, "s": SPACES}.get(letter.lower())
    return complement(ranges) if ranges and letter.isupper() else ranges


def class_ranges(members: str, pattern: str) -> Ranges:
    """The ranges of the characters between square brackets."""
    ranges: Ranges = []
    found = list(MEMBER.finditer(members))
    i = 0
    while i < len(found):
        if found[i][3] and (named := category(found[i][3])):
            ranges += named
            i += 1
            continue
        low = high = code_point(found[i])
        if i + 2 < len(found) and found[i + 1][0] == "-":
            high = code_point(found[i + 2])
            i += 2
        if high < low:
            raise ValueError(f"pattern={pattern!r} has the range {chr(low)}-{chr(high)}, which is empty; reverse it")
        ranges.append((low, high))
        i += 1
    return ranges


def code_point(member: re.Match[str]) -> int:
    hexadecimal, escaped = member[1] or member[2], member[3]
    if hexadecimal:
        return int(hexadecimal, 16)
    return CONTROLS.get(escaped, ord(escaped)) if escaped else ord(member[4])


def complement(ranges: Ranges) -> Ranges:
    result, start = [], 0
    for low, high in sorted(ranges):
        if low > start:
            result.append((start, low - 1))
        start = max(start, high + 1)
    return [*result, (start, LAST)] if start <= LAST else result


def write_class(ranges: Ranges, pattern: str) -> str:
    """The class of these characters without those that JSON escapes, and without surrogates."""
    kept = complement([*complement(ranges), *UNQUOTED, (0xD800, 0xDFFF)])
    if not kept:
        raise ValueError(f"pattern={pattern!r} has a class of only characters that are escaped in JSON; remove it")
    return "[" + "".join(write(low) if low == high else f"{write(low)}-{write(high)}" for low, high in kept) + "]"


def write(code: int) -> str:
    character = chr(code)
    return character if character.isalnum() or code > 0xFFFF else f"\\u{code:04x}"
