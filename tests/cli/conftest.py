"""A demo run of a few steps, made once: what most commands need."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from regard.cli import app


def regard(*arguments: object, say: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=say)


@pytest.fixture(scope="session")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "demo"
    done = regard("demo", "--out", out, "--steps", 3, "--questions", 5)
    assert done.exit_code == 0, done.output
    return out
