"""`regard compare`: which of two models answers better, by a rule, a reward model or a judge."""

import json
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.open_model import DeviceOption
from regard.find_model import find_model

if TYPE_CHECKING:
    from regard.data.sources.base import Example
    from regard.feedback.comparison import Decision
    from regard.feedback.judge import Judge, PositionBias
    from regard.feedback.prompts import AnswerOptions, CountDone

PromptsOption = Annotated[
    str,
    typer.Option(
        help="A file with `prompt` (a string or messages) or `messages` in each row; or world: its questions."
    ),
]
CountOption = Annotated[
    int | None, typer.Option(min=1, help="Only the first prompts, this many; of the world 200 by default.")
]
MaxNewOption = Annotated[int, typer.Option(min=1, help="At most this many tokens per answer.")]
SeedOption = Annotated[int, typer.Option(help="Of sampling.")]
JudgeNameOption = Annotated[str | None, typer.Option(help="The model to ask at an address that serves more than one.")]
ConstitutionOption = Annotated[
    Path | None, typer.Option(help="A TOML file with principles for the judge, and perhaps its question.")
]


def compare(
    first: Annotated[str, typer.Argument(metavar="A", help="A run, a model folder, or the name of a model.")],
    second: Annotated[str, typer.Argument(metavar="B", help="The model that A is compared with.")],
    prompts: PromptsOption,
    by: Annotated[
        str | None,
        typer.Option(
            help="exact_match, json, module:function, or the folder of a reward model: the larger reward wins. By "
            "default exact_match; for world the score of its answers."
        ),
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(help="A model that compares the answers, or an address on this machine: http://127.0.0.1:8000."),
    ] = None,
    judge_name: JudgeNameOption = None,
    constitution: ConstitutionOption = None,
    count: CountOption = None,
    max_new: MaxNewOption = 256,
    temperature: Annotated[float, typer.Option(help="0 always takes the most likely token.")] = 0.0,
    seed: SeedOption = 0,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write every pair to this .jsonl file.")] = None,
    device: DeviceOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Let two models answer the same prompts, and count how often the answer of A is better.

    The win rate counts ties half; its 95 % interval is Wilson's. A judge is asked about each pair in both orders, and
    the mean of both verdicts decides, so that a preference for the first or second place cancels; the preference is
    printed.

    \b
    Examples:
      regard compare runs/dpo runs/sft --prompts prompts.jsonl --judge models/llama-8b
      regard compare runs/dpo runs/sft --prompts questions.jsonl --by rewards:short_and_right --out pairs.jsonl
      regard compare runs/tuned smollm2 --prompts prompts.jsonl --by runs/reward
      regard compare runs/tuned smollm2 --prompts prompts.jsonl --judge http://127.0.0.1:8000
      regard compare runs/mine runs/demo --prompts world --count 400
    """
    for name in (first, second, *([] if judge is None or "://" in judge else [judge])):
        find_model(name)  # before torch is imported: a mistyped name is refused at once
    if judge is not None and by is not None:
        raise typer.BadParameter("--by and --judge exclude each other; give one of them")
    if judge is None and (constitution is not None or judge_name is not None):
        raise typer.BadParameter("--constitution and --judge-name are for a judge; give one with --judge")
    from regard.feedback.comparison import count_wins
    from regard.feedback.judge import position_bias
    from regard.feedback.prompts import AnswerOptions, read_prompts

    if out is not None and not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}; create it first")
    examples = read_prompts(prompts, count)
    rule = judge or by or default_reward(prompts, examples)
    decider = open_decider(rule, judge, judge_name, constitution, device)
    options = AnswerOptions(max_new, temperature, seed)
    answers = answers_of(first, examples, options, 0, device)
    same = find_model(first).resolve() == find_model(second).resolve()
    others = answers if same and not temperature else answers_of(second, examples, options, len(examples), device)
    with progress_bar("comparing", len(examples)) as on_progress:
        decisions = decider(examples, answers, others, on_progress)
    if out is not None:
        write_pairs(out, examples, answers, others, decisions)
    found = count_wins(decisions)
    bias = position_bias([decision.verdict for decision in decisions if decision.verdict is not None])
    if as_json:
        judged = None if bias is None else bias._asdict()
        names = {"a": first, "b": second, "prompts": len(examples), "by": rule}
        print(json.dumps({**names, **found._asdict(), "interval": "Wilson, 95 %", "position_bias": judged}))
        return
    print_result(first, second, found, bias, same)


def default_reward(prompts: str, examples: "Sequence[Example]") -> str:
    from regard.data.targets import target_of
    from regard.feedback.prompts import WORLD, WORLD_REWARD

    if prompts == WORLD:
        return WORLD_REWARD
    try:
        for example in examples:
            target_of(example)
    except ValueError:  # an example without a target
        raise ValueError(
            "not all prompts have answers to compare with (completion, answer, target, or an answer in messages); give "
            "a rule with --by, or a judge with --judge"
        ) from None
    return "exact_match"


def open_decider(
    by: str, judge: str | None, judge_name: str | None, constitution: Path | None, device: str
) -> "Callable[..., list[Decision]]":
    """A function of (examples, answers, other answers, on_progress) that returns the decisions."""
    from regard.compat import resolve_device
    from regard.feedback.comparison import decide_by_judge, decide_by_reward
    from regard.feedback.constitution import read_constitution
    from regard.feedback.judge import TEMPLATE
    from regard.training.rewards import load_reward

    if judge is not None:
        rules = None if constitution is None else read_constitution(constitution)
        template, principles = (TEMPLATE, ()) if rules is None else (rules.judge, rules.texts)
        opened = open_judge(judge, judge_name, device)
        return lambda examples, answers, others, on_progress: decide_by_judge(
            opened, examples, answers, others, template, principles, on_progress
        )
    reward = load_reward(by, resolve_device(device), "--by")

    def decide(examples: Any, answers: Any, others: Any, on_progress: "CountDone") -> "list[Decision]":
        return decide_by_reward(reward, examples, answers, others)

    return decide


def open_judge(name: str, judge_name: str | None, device: str) -> "Judge":
    from regard.feedback.address_judge import AddressJudge, is_address
    from regard.feedback.judge import ModelJudge

    if is_address(name):
        return AddressJudge(name, judge_name)
    from regard.cli.open_model import open_model

    return ModelJudge(open_model(Path(name), device))


def answers_of(
    name: str, examples: "Sequence[Example]", options: "AnswerOptions", first: int, device: str
) -> list[str]:
    """One model at a time is in memory."""
    from regard.cli.open_model import open_model
    from regard.feedback.prompts import answer_prompts
    from regard.objectives.reinforcement import prompt_of

    llm = open_model(Path(name), device)
    prompts = [prompt_of(example) for example in examples]
    with progress_bar(f"answers of {name}", len(prompts)) as on_progress:
        return answer_prompts(llm, prompts, range(first, first + len(prompts)), options, on_progress)


@contextmanager
def progress_bar(description: str, total: int, done: int = 0) -> "Generator[CountDone]":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(compact=True))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(description, total=total, completed=done)
        yield lambda completed: bar.update(task, completed=completed)


def write_pairs(
    path: Path,
    examples: "Sequence[Example]",
    answers: Sequence[str],
    others: Sequence[str],
    decisions: "Sequence[Decision]",
) -> None:
    names = {1.0: "a", 0.5: "tie", 0.0: "b"}
    with path.open("w", encoding="utf-8") as stream:
        for example, answer, other, decision in zip(examples, answers, others, decisions, strict=True):
            line = {**example, "a": answer, "b": other, "better": names[decision.result]}
            if decision.scores is not None:
                line["scores"] = dict(zip("ab", decision.scores, strict=True))
            if decision.verdict is not None:
                line["verdict"] = {**decision.verdict._asdict(), "preference": decision.verdict.preference}
            stream.write(json.dumps(line, default=str) + "\n")


def print_result(first: str, second: str, found: Any, bias: "PositionBias | None", same: bool) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    console = Console(highlight=False)
    table = Table(
        Column("A", overflow="fold"),
        Column("B", overflow="fold"),
        "A wins",
        "ties",
        "B wins",
        "win rate of A",
        "95 % interval",
    )
    rates = (f"{found.rate:.1%}", f"{found.low:.1%} to {found.high:.1%}")
    table.add_row(escape(first), escape(second), str(found.wins), str(found.ties), str(found.losses), *rates)
    console.print(table)
    if bias is not None:
        console.print(describe_bias(bias))
    if same:
        console.print("A and B are the same model")


def describe_bias(bias: "PositionBias") -> str:
    return (
        f"the judge preferred the answer shown first in {bias.chosen_first:.1%} of its verdicts ({bias.log_odds:+.2f} "
        f"nats; 50 % is unbiased); {bias.inconsistent:.1%} of {bias.pairs} pairs depended on the order"
    )
