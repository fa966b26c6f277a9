"""SmolLM2, which was not trained to call tools, writes only calls that parse, because of the grammar."""

import pytest

from benchmarks.tool_calls import TOOLS, valid_calls


@pytest.mark.slow
@pytest.mark.ledger("tool.call")
def test_calls_of_smollm2_parse() -> None:
    """`python -m benchmarks.tool_calls` draws a thousand."""
    found = valid_calls(24, rows=12)
    assert found.valid == found.asked == 24, found.invalid
    assert set(found.names) == set(TOOLS.names) and len(found.texts) > 6
