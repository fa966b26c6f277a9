"""The grammar of patterns: words with values in brackets, read without knowing what they mean.

pattern = layer ("," layer)*        layer = [number "*"] word ("+" word)*
word    = name ["(" [value ("," value)*] ")"]
value   = [name "="] (number | true | false | word | "[" value ("," value)* "]")
"""

import re
from dataclasses import dataclass, field
from typing import Any

from regard.spec import SpecError

TOKEN = re.compile(r"\s*(?:(?P<number>-?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)|(?P<name>[A-Za-z_]\w*)|(?P<sign>[*+(),=\[\]]))")


@dataclass(frozen=True)
class Term:
    name: str
    places: list[Any] = field(default_factory=list)  # values by place
    named: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerTerms:
    words: tuple[Term, ...]
    times: int = 1


def parse(pattern: str) -> list[LayerTerms]:
    return PatternParser(pattern).pattern()


class PatternParser:
    def __init__(self, text: str):
        self.text, self.tokens, place = text, [], 0
        while text[place:].strip():
            found = TOKEN.match(text, place)
            if found is None:
                raise SpecError(f"pattern {text!r}: {text[place:].strip()[0]!r} means nothing here")
            self.tokens.append((found.lastgroup, found[0].strip()))
            place = found.end()
        self.tokens.append(("end", "the end"))

    def pattern(self) -> list[LayerTerms]:
        layers = [self.layer()]
        while self.take(","):
            layers.append(self.layer())
        if self.tokens[0][0] != "end":
            self.expected("',' or the end")
        return layers

    def layer(self) -> LayerTerms:
        times = 1
        if self.tokens[0][0] == "number":
            times = self.number()
            if not isinstance(times, int) or not 1 <= times <= 10_000:
                raise SpecError(f"pattern {self.text!r}: a layer stands there 1 to 10000 times, not {times}")
            self.want("*")
        words = [self.word()]
        while self.take("+"):
            words.append(self.word())
        return LayerTerms(tuple(words), times)

    def word(self) -> Term:
        if self.tokens[0][0] != "name":
            self.expected("a word such as window(256) or full")
        word = Term(self.tokens.pop(0)[1])
        if self.take("(") and not self.take(")"):
            self.argument(word)
            while self.take(","):
                self.argument(word)
            self.want(")")
        return word

    def argument(self, word: Term) -> None:
        if self.tokens[0][0] == "name" and self.tokens[1][1] == "=":
            name = self.tokens.pop(0)[1]
            self.want("=")
            if name in word.named:
                raise SpecError(f"pattern {self.text!r}: {word.name} says {name} twice")
            word.named[name] = self.value()
        elif word.named:
            raise SpecError(f"pattern {self.text!r}: {word.name} has a value without a name behind one that has one")
        else:
            word.places.append(self.value())

    def value(self) -> Any:
        if self.tokens[0][0] == "number":
            return self.number()
        if self.take("["):
            values = [self.value()]
            while self.take(","):
                values.append(self.value())
            self.want("]")
            return values
        word = self.word()
        return {"true": True, "false": False}.get(word.name, word)

    def number(self) -> int | float:
        text = self.tokens.pop(0)[1]
        return int(text) if text.lstrip("-").isdigit() else float(text)

    def take(self, sign: str) -> bool:
        found = self.tokens[0] == ("sign", sign)
        if found:
            self.tokens.pop(0)
        return found

    def want(self, sign: str) -> None:
        if not self.take(sign):
            self.expected(repr(sign))

    def expected(self, what: str) -> None:
        raise SpecError(f"pattern {self.text!r}: expected {what}, found {self.tokens[0][1]!r}")
