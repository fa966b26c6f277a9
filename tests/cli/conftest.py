"""Commands called in the process of the test."""

from typer.testing import CliRunner, Result

from regard.cli import app


def regard(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)
