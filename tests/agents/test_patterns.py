"""Patterns are matched as by `re`, and never for longer than the time limit."""

import re
import time

import pytest

from regard.agents.patterns import PatternMatcher
from regard.agents.tool import AgentTool, Toolbox, ToolFailure

SLOW = ["(a+)+$", "(a|a)+$", "(a?){30}a{30}$", "a*a*a*a*a*a*a*$", "(a|aa)+$"]
PATTERNS = ["^[a-z]+$", r"^\d{4}-\d{2}$", "^(a|b)*c$", r"(.)\1", "x", "^$", "ü+|é?z", "[a" + "b" * 2000 + "]"]
TEXTS = ["", "a", "abc", "2026-11", "x" * 3, "x" * 1001, "y" * 200_000, "üz", "\ud83d", "line\nbreak\0", '"\\']


def test_the_results_are_those_of_re() -> None:
    with PatternMatcher(120) as matcher:
        for pattern in PATTERNS:
            for text in TEXTS:
                assert matcher.search(pattern, text) == bool(re.search(pattern, text)), (pattern, text)
    assert matcher.process is not None and matcher.process.returncode is not None


def test_simple_patterns_start_no_process() -> None:
    with PatternMatcher() as matcher:
        assert matcher.search("^[a-z]+$", "abc")
    assert matcher.process is None


@pytest.mark.parametrize("pattern", SLOW)
def test_a_pattern_that_takes_exponential_time_is_stopped(pattern: str) -> None:
    with PatternMatcher(60) as matcher:
        assert matcher.search("(a|b)+$", "a")  # the child has started
        matcher.deadline = time.monotonic() + 0.3
        with pytest.raises(ValueError, match="takes more than 60 s; simplify it"):
            matcher.search(pattern, "a" * 200 + "b")
    assert matcher.process is not None and matcher.process.returncode == -9


def test_simple_patterns_have_the_time_limit_too() -> None:
    with PatternMatcher(0) as matcher, pytest.raises(ValueError, match="takes more than 0 s"):
        matcher.search("a", "a")


@pytest.mark.parametrize("pattern", ["(", "(a|b){5,2}", "(" * 5000, "(){2000000000}"])
def test_an_invalid_pattern_is_an_error(pattern: str) -> None:
    with PatternMatcher(60) as matcher:
        with pytest.raises((ValueError, re.error), match="."):
            matcher.search(pattern, "a")
        assert matcher.search("(a|b)+", "a")


def test_a_child_that_ended_is_an_error() -> None:
    with PatternMatcher(60) as matcher:
        assert matcher.search("(a|b)+", "a")
        assert matcher.process is not None
        matcher.process.kill()
        for _ in range(2):
            with pytest.raises(ValueError, match="the child process has ended"):
                matcher.search("(a|b)+", "a")


@pytest.mark.parametrize("place", ["pattern", "patternProperties"])
def test_a_tool_with_such_a_pattern_cannot_be_called(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    long = "a" * 60 + "b"
    schema = {"pattern": "(a+)+$"} if place == "pattern" else {"type": "object", "patternProperties": {"(a+)+$": {}}}
    box = Toolbox([AgentTool("echo", "", {"type": "object", "properties": {"x": schema}}, lambda arguments: "ran")])
    with (
        monkeypatch.context() as patch,
        pytest.raises(ToolFailure, match=r"matching the pattern \(a\+\)\+\$ takes more"),
    ):
        patch.setattr(PatternMatcher.__init__, "__defaults__", (1.0,))
        box.run("echo", {"x": long if place == "pattern" else {long: 1}})
    assert box.run("echo", {"x": "aa" if place == "pattern" else {"aa": 1}}) == "ran"
