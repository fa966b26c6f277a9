"""The grammar of patterns; the names are looked up later (pattern.py).

pattern = layer ("," layer)*        layer = [number "*"] term ("+" term)*
term    = name ["(" [value ("," value)*] ")"]
value   = [name "="] (number | true | false | term | "[" value ("," value)* "]")
"""

import re
from dataclasses import dataclass, field
from typing import Any

from regard.spec import SpecError

NUMBER = r"-?[0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?"
TOKEN = re.compile(rf"\s*(?:(?P<number>{NUMBER})|(?P<name>[A-Za-z_]\w*)|(?P<sign>[*+(),=\[\]]))")


@dataclass(frozen=True)
class Term:
    name: str
    positional: list[Any] = field(default_factory=list)
    named: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerTerms:
    terms: tuple[Term, ...]
    times: int = 1


def parse(pattern: str) -> list[LayerTerms]:
    return PatternParser(pattern).pattern()


class PatternParser:
    def __init__(self, text: str):
        self.text, self.tokens, start = text, [], 0
        while text[start:].strip():
            match = TOKEN.match(text, start)
            if match is None:
                raise SpecError(f"pattern {text!r}: unexpected character {text[start:].strip()[0]!r}")
            self.tokens.append((match.lastgroup, match[0].strip()))
            start = match.end()
        self.tokens.append(("end", "the end"))

    def pattern(self) -> list[LayerTerms]:
        layers = [self.layer()]
        while self.accept(","):
            layers.append(self.layer())
        if self.tokens[0][0] != "end":
            self.fail("',' or the end")
        return layers

    def layer(self) -> LayerTerms:
        times = 1
        if self.tokens[0][0] == "number":
            times = self.number()
            if not isinstance(times, int) or not 1 <= times <= 10_000:
                raise SpecError(f"pattern {self.text!r}: {times} repetitions of a layer; use 1 to 10000")
            self.expect("*")
        terms = [self.term()]
        while self.accept("+"):
            terms.append(self.term())
        return LayerTerms(tuple(terms), times)

    def term(self) -> Term:
        if self.tokens[0][0] != "name":
            self.fail("a term such as window(256) or full")
        term = Term(self.tokens.pop(0)[1])
        if self.accept("(") and not self.accept(")"):
            self.argument(term)
            while self.accept(","):
                self.argument(term)
            self.expect(")")
        return term

    def argument(self, term: Term) -> None:
        if self.tokens[0][0] == "name" and self.tokens[1][1] == "=":
            name = self.tokens.pop(0)[1]
            self.expect("=")
            if name in term.named:
                raise SpecError(f"pattern {self.text!r}: {term.name} has {name} twice; remove one")
            term.named[name] = self.value()
        elif term.named:
            raise SpecError(
                f"pattern {self.text!r}: {term.name} has a positional value after a named one; name it, or put it first"
            )
        else:
            term.positional.append(self.value())

    def value(self) -> Any:
        if self.tokens[0][0] == "number":
            return self.number()
        if self.accept("["):
            values = [self.value()]
            while self.accept(","):
                values.append(self.value())
            self.expect("]")
            return values
        term = self.term()
        return {"true": True, "false": False}.get(term.name, term)

    def number(self) -> int | float:
        text = self.tokens.pop(0)[1]
        return int(text) if text.lstrip("-").isdigit() else float(text)

    def accept(self, sign: str) -> bool:
        found = self.tokens[0] == ("sign", sign)
        if found:
            self.tokens.pop(0)
        return found

    def expect(self, sign: str) -> None:
        if not self.accept(sign):
            self.fail(repr(sign))

    def fail(self, expected: str) -> None:
        raise SpecError(f"pattern {self.text!r}: expected {expected}, found {self.tokens[0][1]!r}")
