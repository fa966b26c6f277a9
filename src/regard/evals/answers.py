"""The answers of an assistant to questions about held-out stories of the world: their content and form.

The prompts are those of the task `question`, answered greedily.
"""

from collections.abc import Callable

from regard.data.world import EVALUATION_SEED
from regard.data.world.answers import AnswerGrade, grade
from regard.data.world.tasks import example
from regard.engine.engine import Engine
from regard.engine.request import Sampling
from regard.evals.generation import run_in_batches
from regard.text.chat import encode_chat
from regard.text.tokenizer import Tokenizer


def grade_assistant(
    engine: Engine,
    tokenizer: Tokenizer,
    count: int,
    level: int = 1,
    on_progress: Callable[[int], None] = lambda done: None,
) -> list[AnswerGrade]:
    """The grades of the answers to `count` questions; `on_progress` is called with their number after every batch."""
    sampling = Sampling(max_new=24, temperature=0, stop_ids=tokenizer.stop_ids)
    questions = [example("question", EVALUATION_SEED + number, level, "held-out") for number in range(count)]
    prompts = [(encode_chat(tokenizer, question["prompt"]), None) for question in questions]
    requests = run_in_batches(engine, prompts, sampling, on_progress)
    return [
        grade(tokenizer.decode(request.output_ids), question["answer"])
        for question, request in zip(questions, requests, strict=True)
    ]
