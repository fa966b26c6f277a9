"""The command line: one file a command, each importing what it needs when it runs, so that `--help` is instant.

Exit codes: 0 done, 1 something is wrong with what was given, 2 wrong usage, 130 interrupted.
"""

import os
import sys

import typer

from regard import __version__
from regard.cli import chat, demo, doctor, export, generate, import_model, lab, lens, models, plan, serve, train, verify

app = typer.Typer(
    name="regard",
    help="Build, train, adapt, serve and look into transformers: one set of parts for all of them.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # drawing the help with rich takes longer than all the rest of starting
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}

app.command("demo")(demo.demo)
app.command("train", context_settings=OVERRIDES)(train.train)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("serve")(serve.serve)
app.command("lens")(lens.lens)
app.command("lab")(lab.lab)
app.command("plan", context_settings=OVERRIDES)(plan.plan)
app.command("verify", context_settings=OVERRIDES)(verify.verify)
app.command("models")(models.models)
app.command("import")(import_model.import_)
app.command("export")(export.export)
app.command("doctor")(doctor.doctor)


@app.callback(invoke_without_command=True)
def options(version: bool = typer.Option(False, "--version", help="Print the version and leave.")) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def main() -> None:
    try:
        app()
    except (ValueError, OSError) as error:  # the user's mistakes; ours keep their traceback
        if os.environ.get("REGARD_TRACEBACK"):
            raise
        print(f"regard: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
