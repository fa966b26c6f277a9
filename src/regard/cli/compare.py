"""`regard compare`: two models side by side, or which answers better, by a rule, a reward model or a judge."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.judging import (
    CountOption,
    JudgeNameOption,
    JudgeOption,
    JudgeRulesOption,
    OptionalPromptsOption,
    SeedOption,
    check_names,
    describe_verdicts,
    open_judge,
    progress_bar,
    read_question,
)
from regard.cli.open_engine import CacheOption, QuantizeOption
from regard.cli.open_model import DeviceOption
from regard.find_model import find_model

if TYPE_CHECKING:
    from regard.data.sources.base import Example
    from regard.feedback.comparison import Decision
    from regard.feedback.judge import JudgeVerdict
    from regard.feedback.prompts import AnswerOptions, CountDone


def compare(
    first: Annotated[str, typer.Argument(metavar="A", help="A run, a model folder, or the name of a model.")],
    second: Annotated[str, typer.Argument(metavar="B", help="The model that A is compared with.")],
    prompts: OptionalPromptsOption = None,
    by: Annotated[
        str | None,
        typer.Option(
            help="exact_match, json, module:function, or the folder of a reward model: the larger reward wins. By "
            "default exact_match; for world the score of its answers."
        ),
    ] = None,
    judge: Annotated[str | None, JudgeOption] = None,
    judge_name: JudgeNameOption = None,
    constitution: JudgeRulesOption = None,
    count: CountOption = None,
    max_new: Annotated[
        int | None, typer.Option(min=1, help="At most this many tokens per answer; 256 by default.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Of the answers; by default 0, which always takes the most likely token.")
    ] = None,
    seed: SeedOption = 0,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write every pair to this .jsonl file.")] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Without --prompts: the text that both read, which neither was trained on; else stories."),
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=2, help="Tokens of this text; 4096 by default.")] = None,
    length: Annotated[int | None, typer.Option(min=2, help="Tokens that are read at a time; 512 by default.")] = None,
    quantize: QuantizeOption = None,
    cache: CacheOption = None,
    speed: Annotated[
        bool | None, typer.Option(help="Measure tokens per second too, both models in turn; by default it is measured.")
    ] = None,
    device: DeviceOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Two models side by side; with --prompts, how often the answer of A is better.

    Without --prompts: the size of both on disk and in memory, the perplexity of the same text, how far their next
    tokens agree, and the speed of decoding. --quantize and --cache change B only, so that a model can be compared with
    itself in few bits. If the tokenizers differ, perplexities per byte are compared, and next tokens are not.

    With --prompts, both answer the same prompts, and wins of A are counted.

    --text, --tokens, --length, --quantize, --cache and --speed are options without --prompts; --by, --judge,
    --judge-name, --constitution, --count, --max-new, --temperature and --out are options with it.

    The win rate counts ties half; its 95 % interval is Wilson's. A judge is asked about each pair in both orders, and
    the mean of both verdicts decides, so that a preference for the first or second place cancels; the preference is
    printed.

    \b
    Examples:
      regard compare smollm2 models/smollm2-int4 --text held_out.txt
      regard compare smollm2 smollm2 --quantize int8 --cache int8 --text held_out.txt
      regard compare runs/dpo runs/sft --prompts prompts.jsonl --judge models/llama-8b
      regard compare runs/dpo runs/sft --prompts questions.jsonl --by rewards:short_and_right --out pairs.jsonl
      regard compare runs/tuned smollm2 --prompts prompts.jsonl --by runs/reward
      regard compare runs/tuned smollm2 --prompts prompts.jsonl --judge http://127.0.0.1:8000
      regard compare runs/mine runs/demo --prompts world --count 400
    """
    if prompts is None:
        judging = {"--by": by, "--judge": judge, "--judge-name": judge_name, "--constitution": constitution}
        answering = {"--count": count, "--max-new": max_new, "--temperature": temperature, "--out": out}
        for name, value in (judging | answering).items():
            if value is not None:
                raise typer.BadParameter(f"{name} is for answers; give prompts with --prompts")
        check_names([first, second], None, None)
        if cache is not None:
            from regard.engine.caches import parse_cache

            parse_cache(cache)
        if text is not None and not text.is_file():
            raise ValueError(f"--text {text}: there is no such file")
        from regard.cli.compare_models import ComparisonOptions, compare_models

        settings = ComparisonOptions(
            text, tokens or 4096, length or 512, quantize, cache, speed is not False, seed, device
        )
        return compare_models((first, second), settings, as_json)
    of_table = {"--text": text, "--tokens": tokens, "--length": length, "--quantize": quantize, "--cache": cache}
    for name, value in (of_table | {"--speed" if speed else "--no-speed": speed}).items():
        if value is not None:
            raise typer.BadParameter(f"{name} is for the table of sizes and perplexities; leave --prompts out")
    check_names([first, second], judge, judge_name)
    max_new, temperature = max_new or 256, temperature or 0.0
    if judge is not None and by is not None:
        raise typer.BadParameter("--by and --judge exclude each other; give one of them")
    if judge is None and constitution is not None:
        raise typer.BadParameter("--constitution is for a judge; give one with --judge")
    if out is not None:
        check_output(out, prompts)
    from regard.checkpoint.atomic_folder import write_file
    from regard.feedback.comparison import count_wins
    from regard.feedback.judge import count_unanswered, position_bias
    from regard.feedback.prompts import AnswerOptions, read_prompts

    examples = read_prompts(prompts, count)
    rule = judge or by or default_reward(prompts)
    if judge is None:
        check_targets(rule, examples)
    decider = open_decider(rule, judge, judge_name, constitution, device)
    options = AnswerOptions(max_new, temperature, seed)
    answers, cut_off = answers_of(first, examples, options, 0, device)
    same = find_model(first).resolve() == find_model(second).resolve()
    others, others_cut_off = answers, cut_off
    if not same or temperature:
        others, others_cut_off = answers_of(second, examples, options, len(examples), device)
    cut = sum(cut_off), sum(others_cut_off)
    with progress_bar("comparing", len(examples)) as on_progress:
        decisions = decider(examples, answers, others, (cut_off, others_cut_off), on_progress)
    found = count_wins(decisions)
    verdicts = [decision.verdict for decision in decisions if decision.verdict is not None]
    if as_json:
        names = {"a": first, "b": second, "prompts": len(examples), "by": rule}
        bias = position_bias(verdicts)
        judged = {"position_bias": bias and bias._asdict(), "unanswered": count_unanswered(verdicts)}
        judged["cut_off"] = dict(zip("ab", cut, strict=True))
        print(json.dumps({**names, **found._asdict(), "interval": "Wilson, 95 %", **judged}))
    else:
        print_result(first, second, found, verdicts, same)
        if any(cut):
            limit = f"{max_new} tokens; --max-new allows longer ones"
            print(f"{cut[0]} answers of A and {cut[1]} of B were cut off at {limit}")
    if out is not None:
        write_file(out.resolve(), pair_lines(examples, answers, others, decisions))


def default_reward(prompts: str) -> str:
    from regard.feedback.prompts import WORLD_REWARD, is_world

    return WORLD_REWARD if is_world(prompts) else "exact_match"


def check_targets(rule: str, examples: "Sequence[Example]") -> None:
    """Raise ValueError if the rule needs answers that the examples do not have."""
    from regard.data.targets import has_target, target_of

    if rule != "exact_match":
        return
    if not all(map(has_target, examples)):
        raise ValueError(
            "not all prompts have answers to compare with (completion, answer, target, or an answer in messages); give "
            "a rule with --by, or a judge with --judge"
        )
    for example in examples:
        target_of(example)  # raises ValueError for a target that is not a string


def open_decider(
    by: str, judge: str | None, judge_name: str | None, constitution: Path | None, device: str
) -> "Callable[..., list[Decision]]":
    """A function of (examples, answers, other answers, which are cut off, on_progress) that returns the decisions."""
    from regard.compat import resolve_device
    from regard.feedback.comparison import decide_by_judge, decide_by_reward
    from regard.training.rewards import load_reward

    if judge is not None:
        template, principles = read_question(constitution)
        opened = open_judge(judge, judge_name, device)
        return lambda examples, answers, others, cut_off, on_progress: decide_by_judge(
            opened, examples, answers, others, template, principles, on_progress
        )
    reward = load_reward(by, resolve_device(device), "--by")

    def decide(examples: Any, answers: Any, others: Any, cut_off: Any, on_progress: "CountDone") -> "list[Decision]":
        return decide_by_reward(reward, examples, answers, others, cut_off)

    return decide


def answers_of(
    name: str, examples: "Sequence[Example]", options: "AnswerOptions", first: int, device: str
) -> tuple[list[str], list[bool]]:
    """The answers, and which of them were cut off. One model at a time is in memory."""
    from regard.cli.open_model import open_model
    from regard.feedback.prompts import ModelAnswers
    from regard.objectives.reinforcement import prompt_of

    answer = ModelAnswers(open_model(Path(name), device), options)
    prompts = [prompt_of(example) for example in examples]
    with progress_bar(f"answers of {name}", len(prompts)) as on_progress:
        return answer(prompts, range(first, first + len(prompts)), on_progress), answer.cut_off


def check_output(path: Path, prompts: str) -> None:
    """Raise ValueError if the file cannot be written, or should not be."""
    from regard.checkpoint.atomic_folder import check_writable

    if not path.parent.is_dir():
        raise ValueError(f"--out {path}: there is no folder {path.parent}; create it first")
    if path.exists() and (not path.is_file() or (Path(prompts).exists() and path.samefile(prompts))):
        wrong = "has the prompts" if path.is_file() else "is not a file"
        raise ValueError(f"--out {path} {wrong}; choose another name")
    check_writable(path.resolve().parent, f"--out {path}")


def pair_lines(
    examples: "Sequence[Example]", answers: Sequence[str], others: Sequence[str], decisions: "Sequence[Decision]"
) -> Iterator[bytes]:
    names = {1.0: "a", 0.5: "tie", 0.0: "b"}
    for example, answer, other, decision in zip(examples, answers, others, decisions, strict=True):
        line = {**example, "a": answer, "b": other, "better": names[decision.result]}
        if decision.scores is not None:
            line["scores"] = dict(zip("ab", decision.scores, strict=True))
        if decision.verdict is not None:
            line["verdict"] = {**decision.verdict._asdict(), "preference": decision.verdict.preference}
        yield (json.dumps(line, default=str) + "\n").encode()


def print_result(first: str, second: str, found: Any, verdicts: "Sequence[JudgeVerdict]", same: bool) -> None:
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
    for line in describe_verdicts(verdicts):
        console.print(line)
    if same:
        console.print("A and B are the same model")
