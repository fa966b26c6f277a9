"""Patterns are matched as by `re`, and never for longer than the time limit."""

import re

import pytest

from regard.agents.patterns import PatternMatcher
from regard.agents.tool import AgentTool, Toolbox, ToolFailure

SLOW = ["(a+)+$", "(a|a)+$", "(a?){30}a{30}$", "a*a*a*a*a*a*a*$", "(a|aa)+$"]
PATTERNS = ["^[a-z]+$", r"^\d{4}-\d{2}$", "^(a|b)*c$", r"(.)\1", "x", "^$", "ü+|é?z"]
TEXTS = ["", "a", "abc", "2026-11", "x" * 3, "x" * 1001, "üz", "\ud83d", "line\nbreak", '"\\']


def test_the_results_are_those_of_re() -> None:
    with PatternMatcher() as matcher:
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
    with pytest.raises(ValueError, match="takes more than 0.3 s; simplify it"), PatternMatcher(0.3) as matcher:
        matcher.search(pattern, "a" * 200 + "b")
    assert matcher.process is not None and matcher.process.returncode == -9


@pytest.mark.parametrize("place", ["pattern", "patternProperties"])
def test_a_tool_with_such_a_pattern_cannot_be_called(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    long = "a" * 60 + "b"
    schema = {"pattern": "(a+)+$"} if place == "pattern" else {"type": "object", "patternProperties": {"(a+)+$": {}}}
    box = Toolbox([AgentTool("echo", "", {"type": "object", "properties": {"x": schema}}, lambda arguments: "ran")])
    with (
        monkeypatch.context() as patch,
        pytest.raises(ToolFailure, match=r"matching the pattern \(a\+\)\+\$ takes more than 0.3 s"),
    ):
        patch.setattr(PatternMatcher.__init__, "__defaults__", (0.3,))
        box.run("echo", {"x": long if place == "pattern" else {long: 1}})
    assert box.run("echo", {"x": "aa" if place == "pattern" else {"aa": 1}}) == "ran"
