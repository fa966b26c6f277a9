"""The command line: one file per command. Each imports what it needs when it runs, so that `--help` starts at once.

Exit codes: 0 success, 1 failure (an invalid value, a missing file), 2 wrong usage, 130 interrupted by Ctrl-C.
"""

import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from regard import __version__
from regard.cli import (
    agent,
    ask,
    batch,
    bench_serve,
    chat,
    compare,
    data,
    data_register,
    data_show,
    demo,
    doctor,
    evaluate,
    evaluate_index,
    evaluate_long,
    evaluate_tasks,
    evaluate_tools,
    export,
    feedback,
    generate,
    import_model,
    index,
    lab,
    lens,
    lens_ablate,
    lens_heads,
    lens_logits,
    lens_names,
    lens_patch,
    lens_report,
    lr_find,
    models,
    pipeline,
    plan,
    plan_train,
    predict,
    quantize,
    runs,
    sample,
    scale,
    serve,
    speculate,
    sweep,
    train,
    transcribe,
    tune,
    verify,
)

HELP = """Build, train, adapt, serve and inspect transformers.

\b
Examples:
  regard demo                                    train a small model in minutes
  regard chat runs/demo --temperature 0          chat with it
  regard serve runs/demo                         serve it, with a web page on 127.0.0.1:8000
  regard plan llama-3.1-8b --context 8192        count parameters, FLOPs and bytes
  regard train llama --out runs/mine             train a model from a recipe
  regard runs compare runs/mine runs/demo        compare the losses and recipes of runs

`regard COMMAND --help` shows the options and examples of a command.
"""


class Commands(TyperGroup):
    """Commands of one or two words: `regard runs`, `regard runs compare`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        two_words = " ".join(args[:2])
        of_group = [name for name in self.commands if name.startswith(f"{args[0]} ")]
        if args[0] not in self.commands and of_group and args[1:] in ([], ["-h"], ["--help"]):
            width = max(map(len, of_group)) + 2
            lines = (f"  regard {name:<{width}}{self.commands[name].get_short_help_str(80)}" for name in of_group)
            typer.echo("Commands:\n" + "\n".join(lines))
            ctx.exit()
        if args[0] == "eval" and two_words not in self.commands and any(arg.split("=")[0] == "--tasks" for arg in args):
            two_words, args = "eval tasks", ["eval", "tasks", *args[1:]]  # `regard eval MODEL --tasks …`
        return super().resolve_command(ctx, [two_words, *args[2:]] if two_words in self.commands else args)


app = typer.Typer(
    name="regard",
    cls=Commands,
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # formatting the help with rich takes longer than everything else at start
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
ACCEPT_OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}

app.command("demo")(demo.demo)
app.command("train", context_settings=ACCEPT_OVERRIDES)(train.train)
app.command("tune", context_settings=ACCEPT_OVERRIDES)(tune.tune)
app.command("pipeline")(pipeline.pipeline)
app.command("lr-find", context_settings=ACCEPT_OVERRIDES)(lr_find.lr_find)
app.command("sweep", context_settings=ACCEPT_OVERRIDES)(sweep.sweep)
app.command("scale", context_settings=ACCEPT_OVERRIDES)(scale.scale)
app.command("runs")(runs.runs)
app.command("runs show")(runs.show)
app.command("runs compare")(runs.compare)
app.command("data")(data.data)
app.command("data tokenizer")(data.tokenizer)
app.command("data show", context_settings=ACCEPT_OVERRIDES)(data_show.show)
app.command("data register")(data_register.register)
app.command("data prepare", context_settings=ACCEPT_OVERRIDES)(data.prepare)
app.command("eval", context_settings=ACCEPT_OVERRIDES)(evaluate.evaluate)
app.command("eval index")(evaluate_index.evaluate_index)
app.command("eval tasks")(evaluate_tasks.evaluate_tasks)
app.command("eval tools")(evaluate_tools.evaluate_tools)
app.command("eval long")(evaluate_long.evaluate_long)
app.command("compare")(compare.compare)
app.command("feedback answer")(feedback.answer)
app.command("feedback revise")(feedback.revise)
app.command("feedback label")(feedback.label)
app.command("predict")(predict.predict)
app.command("sample")(sample.sample)
app.command("transcribe")(transcribe.transcribe)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("index")(index.index)
app.command("ask")(ask.ask)
app.command("agent")(agent.agent)
app.command("serve")(serve.serve)
app.command("batch")(batch.batch)
app.command("bench serve")(bench_serve.bench_serve)
app.command("lens")(lens.lens)
app.command("lens names")(lens_names.names)
app.command("lens heads")(lens_heads.heads)
app.command("lens logits")(lens_logits.logits)
app.command("lens attribute")(lens_logits.attribute)
app.command("lens patch")(lens_patch.patch)
app.command("lens ablate")(lens_ablate.ablate)
app.command("lens report")(lens_report.report)
app.command("lab")(lab.lab)
app.command("plan", context_settings=ACCEPT_OVERRIDES)(plan.plan)
app.command("plan train", context_settings=ACCEPT_OVERRIDES)(plan_train.plan_train)
app.command("verify", context_settings=ACCEPT_OVERRIDES)(verify.verify)
app.command("models")(models.models)
app.command("import")(import_model.import_)
app.command("export")(export.export)
app.command("quantize")(quantize.quantize)
app.command("speculate train", context_settings=ACCEPT_OVERRIDES)(speculate.train)
app.command("doctor")(doctor.doctor)


@app.callback(invoke_without_command=True)
def options(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def main() -> None:
    try:
        app()
    except Exception as error:
        if os.environ.get("REGARD_TRACEBACK") or not is_expected(error):
            raise
        print(f"regard: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def is_expected(error: Exception) -> bool:
    """Whether the error is reported in one line. Other exceptions are bugs and keep their traceback."""
    if isinstance(error, ValueError | OSError):
        return True
    from regard.engine.ranks import RankError  # imports torch, so only after the other types
    from regard.engine.request import GenerationError

    return isinstance(error, GenerationError | RankError)
