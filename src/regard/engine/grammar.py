"""Structured output: a grammar decides which tokens may come next, so that every complete output matches it.

    grammars = GrammarCompiler(vocabulary, stop_ids)         vocabulary: the bytes of every id
    grammar = grammars.json_schema({"type": "integer"})      also: json_object, regex, choice, ebnf
    engine.submit(ids, Sampling(grammar=grammar, stop_ids=stop_ids))

Compiling takes milliseconds to seconds and releases the GIL: call it from another thread than the engine's. A Grammar
can be shared by requests, each of which has a Matcher. Uses xgrammar (Dong et al. 2024), `pip install regard[grammar]`.
"""

import json
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.engine.json_schema import check_schema, enforced_schema

MAX_LENGTH = 1 << 16  # characters of a schema, expression, grammar or all choices
MAX_BYTES = 1 << 26  # of a compiled grammar
CACHE_BYTES = 1 << 28  # of compiled grammars that are kept for the next request with the same
SURROGATE = re.compile(rb"\xed[\xa0-\xbf]")
IN_CLASS = "\f\n\r\t\v \xa0"  # \s of xgrammar, which has fewer spaces than Python
SPACES = "".join(char for char in map(chr, range(0x3001)) if char.isspace() and char not in IN_CLASS)
TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|[\w.-]+|\{(\d+)[^}]*\}|[()|*+?=]')


class Tag(NamedTuple):
    """JSON of a schema between two strings, such as a call of a tool."""

    name: str  # in messages about its schema
    begin: str
    schema: dict[str, Any]
    end: str


class PlainText(NamedTuple):
    """Text whose first character, after spaces, is none of these, and that has none of these strings."""

    not_first: str
    without: tuple[str, ...]

    def format(self) -> dict[str, Any]:
        """As a structural tag of xgrammar."""
        first = r"\s" + SPACES + "".join(f"\\{char}" if char in "[]^-\\" else char for char in self.not_first)
        start = {"type": "regex", "pattern": f"[ \\t\\n\\r]*[^{first}]"}
        return {"type": "sequence", "elements": [start, {"type": "any_text", "excludes": list(self.without)}]}


class GrammarCompiler:
    def __init__(
        self,
        vocabulary: Sequence[bytes],  # of every id; b"" for special tokens, which no grammar allows
        stop_ids: Sequence[int],
        vocab: int | None = None,  # ids of the model, if it has more than the tokenizer
        *,
        seconds: float = 10.0,  # longest compilation
        threads: int = 2,  # compilations at a time
    ):
        try:
            import xgrammar
        except ImportError:
            raise ValueError(
                "structured output needs xgrammar; install it with: pip install 'regard[grammar]'"
            ) from None
        self.vocab, self.seconds = vocab or len(vocabulary), seconds
        stops = [id for id in stop_ids if id < self.vocab]
        if not stops:
            raise ValueError("structured output needs a stop id, with which an output ends; give stop_ids")
        self.xgrammar: Any = xgrammar
        self.threads = threading.BoundedSemaphore(threads)
        tokens = [b"" if SURROGATE.search(token) else token for token in vocabulary[: self.vocab]]
        self.surrogates = Surrogates(tokens, self.vocab)
        tokenizer = xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, vocab_size=self.vocab, stop_token_ids=stops)
        self.compiler: Any = xgrammar.GrammarCompiler(tokenizer, max_threads=1, cache_limit_bytes=CACHE_BYTES)

    def json_schema(self, schema: dict[str, Any] | bool | str) -> "Grammar":
        """JSON that is valid for a schema, in its order of properties. Keywords that cannot be enforced are refused."""
        enforced = enforced_json(schema, "schema")
        return self.compile("schema", lambda: self.compiler.compile_json_schema(enforced, any_whitespace=False))

    def json_object(self) -> "Grammar":
        """Any JSON object."""
        return self.json_schema({"type": "object"})

    def regex(self, pattern: str) -> "Grammar":
        """Strings that match a regular expression as a whole."""
        check_length("regular expression", pattern)
        return self.compile("regular expression", lambda: self.compiler.compile_regex(pattern))

    def choice(self, options: Sequence[str]) -> "Grammar":
        """One of several strings."""
        if isinstance(options, str) or not options or not all(isinstance(option, str) for option in options):
            raise ValueError(f"choice={options!r} must be a list of at least one string")
        check_length("choice", "".join(options))
        return self.ebnf("root ::= " + " | ".join(json.dumps(option, ensure_ascii=False) for option in options))

    def ebnf(self, text: str) -> "Grammar":
        """A context-free grammar in the GBNF notation of llama.cpp, whose first rule is `root`."""
        check_length("grammar", text)
        return self.compile("grammar", lambda: self.compiler.compile_grammar(text))

    def tags(
        self,
        tags: Sequence[Tag],
        *,
        separator: str = "",
        opening: str = "",
        closing: str = "",
        single: bool = False,
        trigger: str | None = None,
        otherwise: PlainText | None = None,
    ) -> "Grammar":
        """One or more tags with separators between them, after `opening` and before `closing`; only one if `single`.

        trigger: a string with which every tag begins; the output is any text then, but what follows it is a tag.
        otherwise: the output may be text instead.
        """
        schemas = [enforced_json(tag.schema, f"schema of {tag.name}") for tag in tags]
        check_length("schemas", "".join(schemas))

        def build() -> Any:
            rules = [str(self.xgrammar.Grammar.from_json_schema(each, any_whitespace=False)) for each in schemas]
            contents = [{"type": "grammar", "grammar": each} for each in rules]
            parts = [
                {"type": "tag", "begin": tag.begin, "content": content, "end": tag.end}
                for tag, content in zip(tags, contents, strict=True)
            ]
            if trigger is not None:
                found = {"type": "triggered_tags", "triggers": [trigger], "tags": parts, "stop_after_first": single}
            else:
                found = {
                    "type": "tags_with_separator", "tags": parts, "separator": separator, "at_least_one": True,
                    "stop_after_first": single,
                }  # fmt: skip
            constants = [{"type": "const_string", "value": text} for text in (opening, closing)]
            format = {"type": "sequence", "elements": [constants[0], found, constants[1]]} if opening else found
            if otherwise is not None:
                format = {"type": "or", "elements": [format, otherwise.format()]}
            return self.compiler.compile_structural_tag(json.dumps({"type": "structural_tag", "format": format}))

        return self.compile("schemas", build)

    def compile(self, name: str, build: Callable[[], Any]) -> "Grammar":
        """Compile in a thread. One that exceeds the time limit cannot be interrupted; it counts until it ends."""
        if not self.threads.acquire(timeout=self.seconds):
            raise ValueError("too many grammars are being compiled; try again later")
        future: Future[Any] = Future()

        def work() -> None:
            try:
                future.set_result(build())
            except Exception as error:  # raised again by future.result
                future.set_exception(error)
            finally:
                self.threads.release()

        threading.Thread(target=work, daemon=True, name="compile-grammar").start()
        try:
            compiled = future.result(self.seconds)
        except TimeoutError:
            raise ValueError(f"the {name} takes longer than {self.seconds:g} s to compile; simplify it") from None
        except RuntimeError as error:
            reason = re.sub(r"^\[[\d:]+\] \S+: ", "", str(error)).strip()
            raise ValueError(f"the {name} is refused: {reason}") from None
        if compiled.memory_size_bytes > MAX_BYTES:
            raise ValueError(f"the {name} compiles to more than {MAX_BYTES >> 20} MB; simplify it")
        grammar = Grammar(compiled, self.vocab, self.surrogates)
        if not has_finite_string(str(compiled.grammar)) or not grammar.matcher().allowed().any():
            raise ValueError(f"no output of this vocabulary matches the {name}; correct it")
        return grammar


class Grammar:
    """A compiled grammar for a vocabulary of `vocab` ids. Requests with equal grammars can share it."""

    def __init__(self, compiled: Any, vocab: int, surrogates: "Surrogates"):
        self.compiled, self.vocab, self.surrogates = compiled, vocab, surrogates

    def matcher(self, stop_ids: Sequence[int] | None = None) -> "Matcher":
        return Matcher(self, stop_ids)


class Matcher:
    """The position of one request in its grammar. Complete output may be followed by a stop id, which ends it."""

    def __init__(self, grammar: Grammar, stop_ids: Sequence[int] | None):
        import xgrammar

        stops = None if stop_ids is None else [id for id in stop_ids if id < grammar.vocab]
        if stops == []:
            raise ValueError(f"stop_ids={stop_ids!r} are not among the {grammar.vocab} ids of the grammar's vocabulary")
        self.matcher: Any = xgrammar.GrammarMatcher(grammar.compiled, override_stop_tokens=stops)
        self.surrogates, self.last = grammar.surrogates, -1

    def allowed(self) -> Tensor:
        """(⌈V / 32⌉,) int32 bits, one per id: whether it may be the next token"""
        mask = torch.full((1, len(self.surrogates.others)), -1, dtype=torch.int32)
        self.matcher.fill_next_token_bitmask(mask, 0)
        return mask[0] & self.surrogates.others if self.last in self.surrogates.first else mask[0]

    def accept(self, id: int) -> None:
        """Advance by a token that is allowed."""
        accepted = self.matcher.accept_token(id)
        assert accepted, f"token {id} is not allowed by the grammar"
        self.last = id


class Surrogates:
    """Tokens that together would encode a surrogate, which xgrammar takes for a character, but UTF-8 does not."""

    def __init__(self, tokens: Sequence[bytes], vocab: int):
        self.first = {id for id, token in enumerate(tokens) if token.endswith(b"\xed")}
        second = [id for id, token in enumerate(tokens) if SURROGATE.match(b"\xed" + token[:1])]
        bits = torch.ones(-(-vocab // 32) * 32, dtype=torch.int64)
        bits[second] = 0
        # (words,) int32, a bit per id that can follow: the 32nd bit is the sign
        self.others = (bits.view(-1, 32) << torch.arange(32)).sum(-1).to(torch.int32)


def allowed_tokens(masks: Sequence[Tensor], vocab: int, device: torch.device) -> Tensor:
    """(n, V) bool from the bits of n matchers"""
    bits = torch.stack(list(masks)).to(device).unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=device)
    return (bits & 1).bool().flatten(1)[:, :vocab]


def enforced_json(schema: dict[str, Any] | bool | str, name: str) -> str:
    """The schema that is enforced, as JSON. ValueError if it is not JSON or cannot be enforced."""
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
        check_length("schema", text)
        parsed = json.loads(text, parse_constant=refuse_constant, parse_int=exact_int)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the schema is not JSON: {error}") from None
    check_schema(parsed, name)
    return json.dumps(enforced_schema(parsed))


def exact_int(digits: str) -> int:
    value = int(digits) if len(digits) < 20 else 2**60
    if abs(value) > 2**53:
        raise ValueError(f"{digits[:40]} is beyond 2**53, which floats do not hold exactly")
    return value


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def check_length(name: str, text: str) -> None:
    if not isinstance(text, str) or not 0 < len(text) <= MAX_LENGTH:
        raise ValueError(f"the {name} must be a string of 1 to {MAX_LENGTH} characters")


def has_finite_string(rules: str) -> bool:
    """Whether a grammar, as xgrammar prints it, derives any finite string from its root.

    A rule derives one if an alternative has only terminals and rules that do. Found by a fixed point over the rules.
    """
    bodies = dict(line.split(" ::= ", 1) for line in rules.splitlines() if " ::= " in line)
    tokens = {name: list(TOKEN.finditer(body)) for name, body in bodies.items()}
    finite: set[str] = set()
    while found := {name for name in tokens.keys() - finite if derives(tokens[name], finite, tokens.keys())}:
        finite |= found
    return "root" in finite


def derives(tokens: list[re.Match[str]], finite: set[str], rules: Any) -> bool:
    """Whether an expression derives a finite string if the rules in `finite` do."""
    stack, alternative, options = [], True, False  # of the open parentheses; this alternative; the earlier ones
    value = True
    for i, token in enumerate(tokens):
        text = token[0]
        if text == "(":
            stack.append((alternative, options))
            alternative, options = True, False
            continue
        if text == "|":
            alternative, options = True, options or alternative
            continue
        if text == ")":
            value = options or alternative
            alternative, options = stack.pop()
        elif text[0] == "{" or text in "*+?=":
            continue
        else:
            value = text not in rules or text in finite
        following = tokens[i + 1] if i + 1 < len(tokens) else None
        optional = following is not None and (following[0] in ("*", "?") or following[1] == "0")
        alternative = alternative and (value or optional)
    return options or alternative
