"""Random JSON in every field of every route is accepted or refused with 400, never an internal error."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from regard.server.attention_schema import HeadBody, OverviewBody
from regard.server.chat_schema import ChatBody
from regard.server.schema import CompletionBody

ROUTES = {
    "/v1/completions": {"model": "tiny", "prompt": "Mira", "max_tokens": 2},
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/regard/tokenize": {"text": "Mira"},
    "/regard/attention/overview": {"ids": [5]},
    "/regard/attention/head": {"ids": [5], "layer": 0, "head": 0},
}
BODIES = (CompletionBody, ChatBody, OverviewBody, HeadBody)
FIELDS = sorted({field for body in BODIES for field in body.model_fields} - {"model"})
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.integers(-3, 20) | st.floats(allow_nan=False, allow_infinity=False)
)
TEXT = st.text(max_size=8) | st.sampled_from(["user", "text", "role", "content", "type", "<|end|>"])
JSON = st.recursive(
    SCALARS | TEXT, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=6
)


@pytest.fixture
def server(start_server):
    return start_server()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from(sorted(ROUTES)), changes=st.dictionaries(st.sampled_from(FIELDS), JSON, min_size=1, max_size=3)
)
def test_no_body_causes_an_internal_error(server, path, changes):
    response = server.client.post(path, json=ROUTES[path] | changes)
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        assert response.json()["error"]["message"]
