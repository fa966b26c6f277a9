"""What every view of the page is held to, in whatever state it is: accessibility, width, page weight."""

from contextlib import suppress
from pathlib import Path

import axe_playwright_python
import pytest
from playwright.sync_api import TimeoutError

AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text()


def assert_accessible(page) -> None:
    """axe finds nothing to object to, with all its rules, best practices included."""
    if page.evaluate("typeof axe") == "undefined":
        page.evaluate(AXE)
    violations = page.evaluate("axe.run(document).then(({ violations }) => violations)")
    found = [
        f"{violation['id']} ({violation['help']}): {node['html'][:160]} {node.get('failureSummary', '')[:200]}"
        for violation in violations
        for node in violation["nodes"]
    ]
    if found:
        pytest.fail("axe found violations:\n" + "\n".join(found), pytrace=False)


def assert_fits(page) -> None:
    """The page scrolls only vertically: nothing but a box that scrolls by itself is wider than the window.

    Charts follow the size of the window one frame later, so the page has some seconds to reach this state.
    """
    wide = """() => [document.documentElement, ...document.querySelectorAll("main, main > :not(.visually-hidden)")]
        .filter((part) => part.scrollWidth > Math.max(part.clientWidth, 1) + 1)
        .map((part) => `${part.tagName} ${part.className}: ${part.scrollWidth} > ${part.clientWidth}`)"""
    with suppress(TimeoutError):
        page.wait_for_function(f"() => ({wide})().length === 0", timeout=10_000)
    assert page.evaluate(wide) == []
