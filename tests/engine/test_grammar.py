"""Structured output: allowed tokens equal those found by brute force, and every complete output matches its grammar."""

import contextlib
import itertools
import json
import random
import re
import threading
from functools import partial
from typing import Any

import jsonschema_rs
import pytest
import torch

from regard.engine.engine import Engine
from regard.engine.grammar import Grammar, GrammarCompiler, PlainText, Tag, allowed_tokens, has_finite_string
from regard.engine.request import GenerationError, Request, Sampling
from regard.engine.stores.paged import Paged
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.position.rope import Rope
from tests.engine.random_schemas import mutate, random_schema

STOP = 0
LETTERS = [b"", b"a", b"b", b"c", b"ab", b"ba", b"abc", b"cc", b"", b"aa"]
BYTES = [b"", *(bytes([byte]) for byte in range(256)), b'{"', b'": ', b"true", b"null", b"12", b"", b'", "']
REGEXES = [
    "ab?c",
    "(a|bc)*",
    "a{2,3}b*",
    "[^a]c?",
    "(ab|ba|c)(aa)?",
    "a.c",
    "b+|c",
    "(a(b|c)){2}",
    "abc",
    "",
    "[a-b]{3}",
]
CHOICES = [["a", "ab", "abc"], ["cc", "ca"], ["b"], ["", "ba"]]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"enum": ["x", "y"]}}, "required": ["n", "s"]}


@pytest.fixture(scope="module")
def letters() -> GrammarCompiler:
    return GrammarCompiler(LETTERS, [STOP])


@pytest.fixture(scope="module")
def bytes_compiler() -> GrammarCompiler:
    return GrammarCompiler(BYTES, [STOP], vocab=len(BYTES) + 3)


@pytest.fixture(scope="module")
def engine() -> Engine:
    block = Block((Sublayer(Attention(2, position=Rope())),))
    model = Decoder(vocab=len(BYTES) + 3, width=16, layers=(Repeat((block,), 1),), context=2048).build(seed=1)
    return Engine(model.double(), rows=50, queue=2000, store=partial(Paged, blocks=3000))


def allowed_ids(grammar: Grammar, ids: tuple[int, ...]) -> set[int]:
    matcher = grammar.matcher((STOP,))
    for id in ids:
        matcher.accept(id)
    (allowed,) = allowed_tokens([matcher.allowed()], grammar.vocab, torch.device("cpu"))
    return set(allowed.nonzero().flatten().tolist())


def check_against_language(grammar: Grammar, language: set[str]) -> None:
    """Walk over all reachable token sequences. language: all strings of the grammar up to a length."""
    texts = [token.decode() for token in LETTERS]
    prefixes = {string[:end] for string in language for end in range(len(string) + 1)}
    reached = [((), "")]
    for ids, text in reached:
        expected = {id for id, token in enumerate(texts) if token and text + token in prefixes}
        expected |= {STOP} if text in language else set()
        found = allowed_ids(grammar, ids)
        assert {id for id in found if len(text + texts[id]) <= 4} == {
            id for id in expected if len(text + texts[id]) <= 4
        }
        reached += [((*ids, id), text + texts[id]) for id in expected - {STOP} if len(text + texts[id]) <= 3]
    assert len(reached) > 1 or language == {""}


@pytest.mark.ledger("dec.structured")
@pytest.mark.parametrize("pattern", REGEXES)
def test_the_mask_of_a_regular_expression_is_exact(letters: GrammarCompiler, pattern: str) -> None:
    strings = ("".join(chars) for length in range(8) for chars in itertools.product("abc", repeat=length))
    if not pattern:
        with pytest.raises(ValueError, match="the regular expression must be a string of 1 to"):
            letters.regex(pattern)
        return
    check_against_language(letters.regex(pattern), {string for string in strings if re.fullmatch(pattern, string)})


@pytest.mark.ledger("dec.structured")
@pytest.mark.parametrize("options", CHOICES, ids=str)
def test_the_mask_of_a_choice_is_exact(letters: GrammarCompiler, options: list[str]) -> None:
    check_against_language(letters.choice(options), set(options))


def test_the_mask_of_a_context_free_grammar_is_exact(letters: GrammarCompiler) -> None:
    """Balanced a and b: no regular expression describes them."""
    grammar = letters.ebnf('root ::= "a" root "b" | "c"')
    check_against_language(grammar, {"a" * n + "c" + "b" * n for n in range(5)})


def test_text_or_tags_are_told_apart_by_their_first_character(bytes_compiler: GrammarCompiler) -> None:
    tag = Tag("f", '{"f": ', {"type": "integer"}, "}")
    grammar = bytes_compiler.tags([tag], separator="; ", otherwise=PlainText("{<", ("<|call|>",)))
    for text, prefix, whole in [
        ('{"f": 3}; {"f": 4}', True, True),
        ('{"f": 3', True, False),
        ('{"f": x', False, False),
        ('\n a {"f": x}', True, True),
        ("a < b <|cal", True, True),
        ("a <|call|>", False, False),
        (" {", False, False),
        ("<", False, False),
        ("\u2003", False, False),  # a space in Python: a brace after it begins a call
    ]:
        matcher = grammar.matcher((STOP,)).matcher
        assert matcher.accept_string(text) == prefix, text
        assert (prefix and matcher.accept_token(STOP)) == whole, text


def test_choices_are_literal(bytes_compiler: GrammarCompiler, engine: Engine) -> None:
    options = ['a "b" \\ [c]|d', "ünï\n\tx", "{1,2}*", "\x01 \u2028"]
    grammar = bytes_compiler.choice(options)
    found = {generate(engine, grammar, seed=seed) for seed in range(40)}
    assert found <= set(options) and len(found) > 2


def generate(engine: Engine, grammar: Grammar, **settings) -> str:
    tokens = engine.generate([1, 2], Sampling(max_new=900, stop_ids=(STOP,), grammar=grammar, **settings))
    assert tokens[-1].finish == "stop" and tokens[-1].id == STOP
    return b"".join(BYTES[token.id] for token in tokens).decode()


def text_of(request: Request) -> str:
    assert request.finish == "stop", (request.finish, request.error)
    return b"".join(BYTES[token.id] for token in request.new).decode()


def finite_float(digits: str) -> float:
    """JSON has no limit for exponents, but the validator takes finite floats only."""
    return max(-1e308, min(float(digits), 1e308))


def check_outputs(engine: Engine, compiled: list[tuple[Any, Grammar]]) -> None:
    """Generate an output for each schema, and validate it."""
    bias = {BYTES.index(end): 4.0 for end in (b'"', b"}", b"]")}  # keeps the output of an untrained model short
    requests = [
        engine.submit([1, 2], Sampling(max_new=1500, stop_ids=(STOP,), grammar=grammar, seed=seed, logit_bias=bias))
        for seed, (_, grammar) in enumerate(compiled)
    ]
    while not engine.idle:
        engine.step()
    for (schema, _), request in zip(compiled, requests, strict=True):
        text = text_of(request)
        value = json.loads(text, parse_float=finite_float)
        assert jsonschema_rs.validator_for(schema).is_valid(value), (schema, text)


@pytest.mark.ledger("dec.structured")
def test_output_is_valid_for_a_thousand_random_schemas(engine: Engine, bytes_compiler: GrammarCompiler) -> None:
    rng = random.Random(1)
    schemas = [random_schema(rng) for _ in range(1000)]
    check_outputs(engine, [(schema, bytes_compiler.json_schema(schema)) for schema in schemas])


def test_a_mutated_schema_is_refused_or_enforced(engine: Engine, bytes_compiler: GrammarCompiler) -> None:
    rng, compiled, refused = random.Random(2), [], 0
    for _ in range(3000):
        schema = mutate(rng, random_schema(rng, depth=2))
        try:
            grammar = bytes_compiler.json_schema(schema)
        except ValueError:
            refused += 1
            continue
        with contextlib.suppress(jsonschema_rs.ValidationError, ValueError):  # not a schema, such as {"title": 3}
            jsonschema_rs.validator_for(schema)
            compiled.append((schema, grammar))
    assert refused > 1000 and len(compiled) > 200
    check_outputs(engine, compiled)


def test_a_json_object_parses(engine: Engine, bytes_compiler: GrammarCompiler) -> None:
    grammar, bias = bytes_compiler.json_object(), {BYTES.index(b'"'): 4.0, BYTES.index(b"}"): 2.0}
    for seed in range(5):
        assert isinstance(json.loads(generate(engine, grammar, seed=seed, logit_bias=bias)), dict)


def test_batched_and_preempted_requests_equal_each_alone(bytes_compiler: GrammarCompiler, engine: Engine) -> None:
    small = Engine(next(iter([engine.model])), rows=4, capacity=64, store=partial(Paged, block=4, blocks=14), queue=99)
    grammars = [bytes_compiler.regex("[a-f]{9,20}"), None, bytes_compiler.json_schema(SCHEMA)]
    settings = [
        Sampling(max_new=30, stop_ids=(STOP,), seed=seed, grammar=grammars[seed % 3], frequency_penalty=seed % 2)
        for seed in range(12)
    ]
    requests = [small.submit([1 + seed] * 5, each) for seed, each in enumerate(settings)]
    while not small.idle:
        small.step()
    assert small.metrics()["preemptions"] > 0
    for request in requests:
        alone = engine.generate(request.ids, request.sampling)
        assert [token.id for token in request.new] == [token.id for token in alone]


REFUSED = [
    ("regex", "[^\\s\\S]", "no output of this vocabulary matches the regular expression"),
    ("regex", "(a", "the regular expression is refused: Regex parsing error at position 3: The parenthesis is not"),
    ("regex", "(?=a)b", "Lookahead is not supported"),
    ("regex", "d", "no output of this vocabulary matches the regular expression"),  # no token has this letter
    ("regex", "a" * 70_000, "the regular expression must be a string of 1 to 65536 characters"),
    ("regex", 5, "the regular expression must be a string"),
    ("choice", [], r"choice=\[\] must be a list of at least one string"),
    ("choice", "abc", "choice='abc' must be a list"),
    ("choice", ["a", 3], "must be a list of at least one string"),
    ("ebnf", 'root ::= "a" root', "no output of this vocabulary matches the grammar"),
    ("ebnf", 'root ::= "a" x\nx ::= "b" y | "c" x\ny ::= x', "no output of this vocabulary matches the grammar"),
    ("ebnf", 'root ::= "a" x', 'Rule "x" is not defined'),
    ("ebnf", 'first ::= "a"', 'root rule with name "root" is not found'),
    ("json_schema", "{", "the schema is not JSON"),
    ("json_schema", "[" * 50_000, "the schema is not JSON"),
    ("json_schema", {"type": "integer", "minimum": float("nan")}, "the schema is not JSON"),
    ("json_schema", '{"const": NaN}', "NaN is not a JSON number"),
    ("json_schema", {"const": 2**60}, "is beyond 2.*53, which floats do not hold exactly"),
    ("json_schema", {1, 2}, "the schema is not JSON"),
    ("json_schema", False, "cannot accept any value"),
    ("json_schema", {"$ref": "#"}, "no output of this vocabulary matches the schema"),
]


@pytest.mark.ledger("dec.structured")
@pytest.mark.parametrize(("method", "spec", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_grammar_without_output_is_refused(letters: GrammarCompiler, method: str, spec, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        getattr(letters, method)(spec)
    assert "/project" not in str(caught.value) and "\n" not in str(caught.value)


def test_recursive_schemas_are_compiled(bytes_compiler: GrammarCompiler, engine: Engine) -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
    grammar = bytes_compiler.json_schema({"$ref": "#/$defs/node", "$defs": {"node": node}})
    assert isinstance(json.loads(generate(engine, grammar, seed=3)), dict)
    endless = {"$ref": "#/$defs/node", "$defs": {"node": node | {"required": ["next"]}}}
    with pytest.raises(ValueError, match="no output of this vocabulary matches the schema"):
        bytes_compiler.json_schema(endless)


@pytest.mark.parametrize(
    ("rules", "finite"),
    [
        ('root ::= (("a" root) | ([b-c]* x))\nx ::= (("e"))', True),
        ('root ::= (("a" root))', False),
        ('root ::= ((x{0, 3}))\nx ::= (("(" x))', True),
        ('root ::= ((x{2, 3}))\nx ::= (("|" x))', False),
        ('root ::= ("" | (root))', True),
        ('root ::= ((x y))\nx ::= (("a"))\ny ::= (([\\]|] y))', False),
    ],
)
def test_grammars_without_finite_strings_are_found(rules: str, finite: bool) -> None:
    assert has_finite_string(rules) == finite


def test_a_slow_compilation_is_abandoned(bytes_compiler: GrammarCompiler) -> None:
    compiler = GrammarCompiler(BYTES, [STOP], seconds=0.05, threads=1)
    release = threading.Event()
    with pytest.raises(ValueError, match=r"the grammar takes longer than 0.05 s to compile; simplify it"):
        compiler.compile("grammar", release.wait)
    with pytest.raises(ValueError, match="too many grammars are being compiled; try again later"):
        compiler.regex("a")
    release.set()
    assert compiler.threads.acquire(timeout=30)  # until the abandoned thread has ended
    compiler.threads.release()
    compiler.seconds = 10
    assert compiler.regex("a").vocab == len(BYTES)


def test_a_dead_end_of_the_vocabulary_fails_only_its_request(tiny) -> None:
    """The vocabulary has no token with d, so the string cannot be completed after its first letter."""
    vocabulary = [*LETTERS, *[b""] * (61 - len(LETTERS))]
    engine, grammar = Engine(tiny()), GrammarCompiler(vocabulary, [STOP]).choice(["ad", "bd"])
    neighbour = engine.submit([3, 4], Sampling(max_new=9, temperature=0))
    with pytest.raises(GenerationError, match="allow no token here"):
        engine.generate([1], Sampling(grammar=grammar, stop_ids=(STOP,)))
    while not engine.idle:
        engine.step()
    assert len(neighbour.new) == 9


def test_settings_that_contradict_a_grammar_are_refused(letters: GrammarCompiler, tiny) -> None:
    grammar = letters.choice(["a"])
    assert not Sampling(grammar=grammar, stop_ids=(0,)).plain
    for settings, message in [
        ({"grammar": "a"}, "grammar='a' must be a Grammar"),
        ({"grammar": grammar}, "a grammar needs stop_ids"),
        ({"grammar": grammar, "stop_ids": (0,), "ignore_eos": True}, "a grammar needs stop_ids"),
        ({"grammar": grammar, "stop_ids": (0,), "min_new": 3}, "min_new=3 cannot be combined with a grammar"),
        ({"grammar": grammar, "stop_ids": (0,), "forced_eos_id": 3}, "forced_eos_id=3 cannot be combined"),
    ]:
        with pytest.raises(ValueError, match=message):
            Sampling(**settings)
    with pytest.raises(ValueError, match="the grammar is compiled for 10 ids, but the model has 61"):
        Engine(tiny()).submit([1], Sampling(grammar=grammar, stop_ids=(0,)))
    with pytest.raises(ValueError, match="stop_ids=.* are not among the 10 ids"):
        grammar.matcher((10,))
    with pytest.raises(ValueError, match="structured output needs a stop id"):
        GrammarCompiler(LETTERS, [99])
