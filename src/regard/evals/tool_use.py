"""Held-out tasks of the world (regard/data/world/tool_tasks.py), solved with tools and without.

With tools, the model is in the loop of an agent: a calculator, and SQL on the database of the task's world. Without, it
answers the question at once. Both are greedy, and an answer is correct only as a whole.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from regard.agents.calculator import calculator
from regard.agents.loop import AgentLimits, AgentMessage, run_agent
from regard.agents.model_writer import ModelWriter
from regard.agents.sql import sql_tool
from regard.agents.tool import Toolbox
from regard.data.world import EVALUATION_SEED
from regard.data.world.tool_tasks import ToolTask, tool_task
from regard.engine.request import Sampling
from regard.text.chat import encode_chat
from regard.text.detokenizer import TextStream
from regard.text.tokenizer import Tokenizer
from regard.text_generation import Prompt, TextGenerator

ANSWER = 24  # tokens of an answer without tools
LIMITS = AgentLimits(steps=6, tokens=400)


class SolvedTask(NamedTuple):
    task: ToolTask
    with_tools: str | None  # the answer; None: the loop ended without one
    calls: int  # that it took
    without_tools: str

    @property
    def correct(self) -> tuple[bool, bool]:
        """With tools, and without."""
        return self.with_tools == self.task.answer, self.without_tools == self.task.answer


def solve_tasks(
    writer: ModelWriter, count: int, level: int = 1, on_progress: Callable[[int], None] = lambda done: None
) -> list[SolvedTask]:
    """`on_progress` is called with the number of solved tasks."""
    tasks = [tool_task(EVALUATION_SEED + number, level, "held-out") for number in range(count)]
    plain = answers_without_tools(writer.texts, writer.tokenizer, tasks)
    solved: list[SolvedTask] = []
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "world.db"
        for task, without in zip(tasks, plain, strict=True):
            database.unlink(missing_ok=True)
            task.facts.write(database)
            if not solved:
                tools = Toolbox([calculator(), sql_tool(database)])  # its tables are the same in every world
            solved.append(SolvedTask(task, *answer_with_tools(writer, tools, task.question), without))
            on_progress(len(solved))
    return solved


def answer_with_tools(writer: ModelWriter, tools: Toolbox, question: str) -> tuple[str | None, int]:
    """The answer and the number of calls."""
    messages: list[AgentMessage] = [{"role": "user", "content": question}]
    answer, calls = None, 0
    for event in run_agent(writer, tools, messages, LIMITS):
        calls += event.kind == "call"
        answer = event.fields.get("answer", answer)
    return answer, calls


def answers_without_tools(texts: TextGenerator, tokenizer: Tokenizer, tasks: list[ToolTask]) -> list[str]:
    sampling = Sampling(max_new=ANSWER, temperature=0, stop_ids=tokenizer.stop_ids)
    prompts = [
        Prompt(
            encode_chat(tokenizer, [{"role": "user", "content": task.question}]), sampling, texts.engine.submit,
            partial(plain_stream, tokenizer),
        )
        for task in tasks
    ]  # fmt: skip
    return [text.strip() for text in texts.generate(prompts)]


def plain_stream(tokenizer: Tokenizer, request: object) -> TextStream:
    return TextStream(tokenizer)


def counts_by_kind(solved: list[SolvedTask]) -> dict[str, tuple[int, int, int]]:
    """(correct with tools, correct without, tasks) per kind of task."""
    found: dict[str, tuple[int, int, int]] = {}
    for each in solved:
        with_tools, without, asked = found.get(each.task.kind, (0, 0, 0))
        found[each.task.kind] = (with_tools + each.correct[0], without + each.correct[1], asked + 1)
    return dict(sorted(found.items()))
