"""Tasks of the simulated world: its held-out stories, with shots from stories of training.

world-stories     the perplexity of stories
world-choices     a question about a story with up to four answers, all of its kind
world-questions   the same, with a generated answer
"""

from functools import partial
from itertools import count
from random import Random

from regard.data.world import EVALUATION_SEED, Story, story
from regard.data.world import Question as WorldQuestion
from regard.evals.task_file import EvalQuestion, EvalTask

ROWS, SHOTS, CHOICES = 200, 16, 4
NEXT_STORY = 1 << 20


def stories_task(level: int = 1) -> EvalTask:
    texts = [EvalQuestion(f"story {n}", story(EVALUATION_SEED + n, level, "held-out").text, ()) for n in range(ROWS)]
    return EvalTask("world-stories", "perplexity", texts)


def questions_task(choose: bool, level: int = 1) -> EvalTask:
    """choose: between choices; else the answer is generated."""
    held_out = [ask(EVALUATION_SEED + n, level, "held-out", choose) for n in range(ROWS)]
    shots = [ask(EVALUATION_SEED + n, level, "train", choose) for n in range(SHOTS)]
    name, kind = ("world-choices", "choice") if choose else ("world-questions", "generation")
    return EvalTask(name, kind, held_out, shots, max_new=24)


def ask(seed: int, level: int, split: str, choose: bool) -> EvalQuestion:
    tale = story(seed, level, split)
    asked = tale.questions[seed % len(tale.questions)]
    choices = draw_choices(tale, asked, seed, level, split) if choose else ()
    return EvalQuestion(f"{split} story {seed}", f"{tale.text} {asked.text}", (asked.answer,), choices)


def draw_choices(tale: Story, asked: WorldQuestion, seed: int, level: int, split: str) -> tuple[str, ...]:
    """The answer among others of its kind: those of this story, then of later ones, in random order. Kinds with fewer
    answers, such as yes and no, have fewer choices."""
    found = {asked.answer: None}
    for number in count(1):
        found |= dict.fromkeys(other.answer for other in tale.questions if other.kind == asked.kind)
        if len(found) >= CHOICES or number > 50:
            break
        tale = story(seed + number * NEXT_STORY, level, split)
    choices = list(found)[:CHOICES]
    Random(f"choices/{level}/{seed}").shuffle(choices)
    return tuple(choices)


WORLD_TASKS = {
    "world-stories": stories_task,
    "world-choices": partial(questions_task, True),
    "world-questions": partial(questions_task, False),
}
