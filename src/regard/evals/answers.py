"""The answers of an assistant to questions about held-out stories of the world: their content and form.

The prompts are those of the task `question`, answered greedily.
"""

from collections.abc import Callable

from regard.data.world.answers import AnswerGrade, grade
from regard.data.world.tasks import example
from regard.engine.engine import Engine
from regard.engine.request import Sampling
from regard.text.chat import encode_chat
from regard.text.tokenizer import Tokenizer

FIRST = 1 << 50  # seeds of stories that no training run reaches


def grade_assistant(
    engine: Engine,
    tokenizer: Tokenizer,
    count: int,
    level: int = 1,
    on_progress: Callable[[int], None] = lambda done: None,
) -> list[AnswerGrade]:
    """The grades of the answers to `count` questions; `on_progress` is called with their number after every batch."""
    sampling = Sampling(max_new=24, temperature=0, stop_ids=tokenizer.stop_ids)
    questions = [example("question", FIRST + number, level, "held-out") for number in range(count)]
    grades: list[AnswerGrade] = []
    for start in range(0, count, engine.store.rows):
        batch = questions[start : start + engine.store.rows]
        requests = [engine.submit(encode_chat(tokenizer, question["prompt"]), sampling) for question in batch]
        while not engine.idle:
            engine.step()
        for question, request in zip(batch, requests, strict=True):
            ids = [token.id for token in request.new if token.finish != "stop"]
            grades.append(grade(tokenizer.decode(ids), question["answer"]))
        on_progress(len(grades))
    return grades
