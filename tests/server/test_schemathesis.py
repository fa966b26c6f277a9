"""Requests that schemathesis generates from /openapi.json, valid and invalid, for every route.

No response is an internal error, has an undocumented status or content type, or a body without the documented schema.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from rich.console import Console
from schemathesis import checks

from regard.cli import demo_process
from regard.cli.model_library import ModelLibrary
from regard.cli.open_engine import EngineOptions
from regard.cli.served_runs import ServedRuns
from regard.server.app import create_app
from regard.server.served_model import ServedModel, TextEncoder
from regard.text.train import byte
from tests.server.conftest import REPLY, ending_demos, serve
from tests.server.fake_engine import FakeEngine, fake_embeddings, fake_lens

CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
MODES = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]


def make_app(folder: Path = Path("nosuch")) -> FastAPI:
    tokenizer, encoder = byte(), TextEncoder(fake_embeddings, context=4096)
    engine = FakeEngine(tokenizer, REPLY)
    model = ServedModel("tiny", tokenizer, engine, lens=fake_lens(), encoder=encoder)
    runs = ServedRuns(folder / "runs")
    library = ModelLibrary([], EngineOptions(device="cpu"), runs, Console(quiet=True))
    return create_app([model], runs=runs, library=library)


OPERATIONS = [result.ok() for result in schemathesis.openapi.from_dict(make_app().openapi()).get_all_operations()]


def max_examples(operation) -> int:
    """The bodies of /v1 routes nest and have dozens of fields; those of the page's routes are flat."""
    return 300 if operation.path.startswith("/v1/") else 60


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    app = make_app(tmp_path_factory.mktemp("fuzzed"))
    with pytest.MonkeyPatch.context() as patch, ending_demos(), serve(app) as port:
        patch.setattr(demo_process, "COMMAND", ["true"])  # in the place of training
        yield f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
@pytest.mark.parametrize("thorough", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "many"])
def test_every_route_answers_as_documented(url, operation, mode, thorough):
    @settings(
        max_examples=max_examples(operation) if thorough else 4,
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
        case.call_and_validate(base_url=url, checks=CHECKS, timeout=60)

    try:
        check()
    except Unsatisfiable:  # a route without parameters has no invalid requests
        assert mode == schemathesis.GenerationMode.NEGATIVE
