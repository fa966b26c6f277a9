"""`regard feedback`: training data from a model's answers, from its critiques of them, or from a judge."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from regard.cli.judging import (
    CountOption,
    JudgeNameOption,
    JudgeOption,
    JudgeRulesOption,
    MaxNewOption,
    PromptsOption,
    SeedOption,
    TemperatureOption,
    check_names,
    describe_verdicts,
    open_judge,
    progress_bar,
    read_question,
)
from regard.cli.open_model import DeviceOption
from regard.find_model import find_model

if TYPE_CHECKING:
    from regard.feedback.prompts import ModelAnswers

AnsweringModel = Annotated[str, typer.Argument(metavar="MODEL", help="A run, a model folder, or the name of a model.")]
OutOption = Annotated[Path, typer.Option("--out", "-o", help="The .jsonl file of the examples; it is continued.")]
PrinciplesOption = Annotated[
    Path | None, typer.Option(help="A TOML file with principles; by default those of the package.")
]


def revise(
    model: AnsweringModel,
    prompts: PromptsOption,
    out: OutOption,
    constitution: PrinciplesOption = None,
    rounds: Annotated[int, typer.Option(min=1, help="Critiques and revisions per answer.")] = 1,
    count: CountOption = None,
    max_new: MaxNewOption = 256,
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
) -> None:
    """Let a model answer prompts, criticise each answer by a written principle, and rewrite it.

    Each line of the output is a conversation with the last revision as `messages`, for `regard tune sft`; the first
    answer is its `initial`, and `rounds` has the principles, critiques and revisions. After an interruption the same
    command goes on.

    \b
    Examples:
      regard feedback revise smollm2 --prompts prompts.jsonl --out revised.jsonl
      regard feedback revise smollm2 --prompts prompts.jsonl --constitution mine.toml --rounds 2 --out revised.jsonl
      regard tune sft smollm2 --data revised.jsonl --out runs/revised
    """
    find_model(model)  # before torch is imported: a mistyped name is refused at once
    from regard.feedback.constitution import read_constitution
    from regard.feedback.output import PromptOutput
    from regard.feedback.prompts import read_prompts
    from regard.feedback.revise import revise as revise_answers

    rules = read_constitution(constitution)
    examples = read_prompts(prompts, count, "train")
    settings = {"rules": rules, "rounds": rounds} | sampling(max_new, temperature, seed)
    written = changed = 0
    with PromptOutput(out, examples, settings, [model]) as output:
        if output.start < len(examples):
            answer = open_answers(model, device, max_new, temperature, seed)

            def make_lines(prompts: Any, numbers: Any) -> list[dict[str, Any]]:
                nonlocal written, changed
                found = revise_answers(answer, prompts, numbers, rules, rounds, seed)
                written += len(found)
                changed += sum(revision.final != revision.initial for revision in found)
                return [revision.as_line() for revision in found]

            write_lines(output, make_lines, answer, f"revising answers of {model}")
    print(f"{out}: {len(examples)} conversations, {written} of them new, in {changed} of which the revision differs")


def answer(
    model: AnsweringModel,
    prompts: PromptsOption,
    out: OutOption,
    count: CountOption = None,
    max_new: MaxNewOption = 256,
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
) -> None:
    """Write a model's answers to prompts, for another model to learn from: sequence-level distillation.

    Each line of the output is a conversation with the answer as `messages`, for `regard tune sft` (Kim & Rush 2016).
    The models may have different tokenizers. After an interruption the same command goes on.

    \b
    Examples:
      regard feedback answer smollm2 --prompts prompts.jsonl --out answers.jsonl
      regard tune sft runs/mine --data answers.jsonl --out runs/student
    """
    find_model(model)  # before torch is imported: a mistyped name is refused at once
    from regard.feedback.output import PromptOutput
    from regard.feedback.prompts import as_messages, read_prompts
    from regard.feedback.revise import assistant

    examples = read_prompts(prompts, count, "train")
    with PromptOutput(out, examples, sampling(max_new, temperature, seed), [model]) as output:
        if (start := output.start) < len(examples):
            generate = open_answers(model, device, max_new, temperature, seed)

            def make_lines(prompts: Any, numbers: Any) -> list[dict[str, Any]]:
                conversations = [as_messages(prompt) for prompt in prompts]
                return [
                    {"messages": [*conversation, assistant(text.strip())]}
                    for conversation, text in zip(conversations, generate(conversations, numbers), strict=True)
                ]

            write_lines(output, make_lines, generate, f"answers of {model}")
    print(f"{out}: {len(examples)} conversations, {len(examples) - start} of them new")


def label(
    model: AnsweringModel,
    prompts: PromptsOption,
    judge: Annotated[str, JudgeOption],
    out: OutOption,
    judge_name: JudgeNameOption = None,
    constitution: JudgeRulesOption = None,
    inconsistent: Annotated[
        Literal["drop", "average"],
        typer.Option(help="Pairs whose verdict depends on the order: drop them, or take the mean of both verdicts."),
    ] = "drop",
    count: CountOption = None,
    max_new: MaxNewOption = 256,
    temperature: Annotated[float, typer.Option(help="Of the two answers; above 0, so that they differ.")] = 1.0,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
) -> None:
    """Sample two answers to each prompt, and let a judge decide which is better.

    Each line of the output has `prompt`, `chosen` and `rejected`, for `regard tune dpo` or `regard tune reward`, and
    the judge's `preference` for the chosen answer. The judge is asked in both orders; equal answers have no line. After
    an interruption the same command goes on.

    \b
    Examples:
      regard feedback label runs/tuned --prompts prompts.jsonl --judge models/llama-8b --out pairs.jsonl
      regard feedback label runs/tuned --prompts prompts.jsonl --judge http://127.0.0.1:8000 --out pairs.jsonl
      regard tune dpo runs/tuned --data pairs.jsonl --out runs/dpo
    """
    models = check_names([model], judge, judge_name)
    if temperature == 0:
        raise typer.BadParameter("--temperature 0 gives the same answer twice; use a value above 0")
    from regard.feedback.label import Labeller
    from regard.feedback.output import PromptOutput
    from regard.feedback.prompts import read_prompts

    template, principles = read_question(constitution)
    examples = read_prompts(prompts, count, "train")
    address = [] if judge in models else [judge, judge_name]
    settings = {"judge": [*address, template, principles], "inconsistent": inconsistent}
    with PromptOutput(out, examples, settings | sampling(max_new, temperature, seed), models) as output:
        if output.start == len(examples):
            print(f"{out} is complete")
            return
        opened = open_judge(judge, judge_name, device)
        answer = open_answers(model, device, max_new, temperature, seed)
        labeller = Labeller(answer, opened, template, principles, inconsistent, answered=output.start > 0)
        write_lines(output, labeller, answer, f"labelling answers of {model}")
        asked = len(examples) - output.start
    pairs = asked - labeller.equal - labeller.dropped
    reason = "no verdict, or one that depends on the order" if inconsistent == "drop" else "no verdict"
    print(
        f"{out}: {pairs} new pairs of {asked} prompts; {labeller.equal} had equal answers, {labeller.dropped} {reason}"
    )
    for line in describe_verdicts(labeller.verdicts):
        print(line)
    if inconsistent == "drop" and labeller.dropped > pairs:
        print("most pairs have no label: take a stronger judge, or --inconsistent average and another --out")


def sampling(max_new: int, temperature: float, seed: int) -> dict[str, Any]:
    return {"max_new": max_new, "temperature": temperature, "seed": seed}


def open_answers(model: str, device: str, max_new: int, temperature: float, seed: int) -> "ModelAnswers":
    from regard.cli.open_model import open_model
    from regard.feedback.prompts import AnswerOptions, ModelAnswers

    return ModelAnswers(open_model(Path(model), device), AnswerOptions(max_new, temperature, seed))


def write_lines(output: Any, make_lines: Any, answers: "ModelAnswers", description: str) -> None:
    if output.start:
        count = len(output.prompts)
        print(f"{output.lines.path} has lines up to prompt {output.start} of {count}; those after it are answered now")
    with progress_bar(description, len(output.prompts), output.start) as on_progress:
        output.write(make_lines, on_progress)
    if any(answers.cut_off):
        print(answers.describe_cut_off())
