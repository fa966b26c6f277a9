"""Requests that schemathesis generates from /openapi.json, valid and invalid, for every route.

No response is an internal error, has an undocumented status or content type, or a body without the documented schema.
"""

from collections.abc import Iterator

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import checks

from regard.server.app import create_app
from regard.server.served_model import ServedModel, TextEncoder
from regard.text.train import byte
from tests.server.conftest import REPLY, serve
from tests.server.fake_engine import FakeEngine, fake_embeddings, fake_lens

CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
MODES = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]


def make_app() -> FastAPI:
    tokenizer, encoder = byte(), TextEncoder(fake_embeddings, context=4096)
    engine = FakeEngine(tokenizer, REPLY)
    return create_app([ServedModel("tiny", tokenizer, engine, lens=fake_lens(), encoder=encoder)])


OPERATIONS = [result.ok() for result in schemathesis.openapi.from_dict(make_app().openapi()).get_all_operations()]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve(make_app()) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
@pytest.mark.parametrize("examples", [4, pytest.param(300, marks=pytest.mark.slow)])
def test_every_route_answers_as_documented(url, operation, mode, examples):
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = "tiny"  # a random name would only give 404
        case.call_and_validate(base_url=url, checks=CHECKS, timeout=30)

    try:
        check()
    except Unsatisfiable:  # a route without parameters has no invalid requests
        assert mode == schemathesis.GenerationMode.NEGATIVE
