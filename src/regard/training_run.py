"""Training from a recipe: starting a run, resuming it.

regard.train("llama", out="runs/mine", overrides={"train.steps": 500})
regard.train(resume="runs/mine")
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from regard.data.packing import tokenize
from regard.data.sources import DataSource
from regard.engine.engine import Engine
from regard.engine.request import Sampling
from regard.language_model import resolve_device
from regard.models.decoder import DecoderModule
from regard.objectives.next_token import next_token
from regard.text.tokenizer import Tokenizer
from regard.training.loop import Trainer, TrainingResult
from regard.training.progress import Listener, progress_listener
from regard.training.recipe import Recipe, find_recipe, read_recipe, resolve
from regard.training.run import Run


def train(
    recipe: str | Path | None = None,
    out: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    resume: str | Path | None = None,
    device: str = "auto",
) -> TrainingResult:
    """Train a model from a recipe (a name such as "llama", or a TOML file), or resume a run.

    out: the run's directory; runs/NAME by default. overrides: values of the recipe by their dotted names.
    """
    if (recipe is None) == (resume is None):
        raise ValueError(f"recipe={recipe!r} and resume={resume!r}; give exactly one of the two")
    if resume is not None:
        if out is not None or overrides:
            raise ValueError(
                f"resume={resume!r} uses the directory and recipe of that run; remove the arguments out and overrides"
            )
        return resume_run(Path(resume), device, Console(stderr=True))
    if not isinstance(recipe, str | Path):
        raise TypeError(
            f"recipe is a {type(recipe).__name__}, not a recipe's name or TOML file; for a spec, write a file: "
            'Path("mine.toml").write_text(regard.Recipe(spec, regard.Training(steps=1000)).to_toml())'
        )
    file = find_recipe(recipe)
    path = Path("runs") / file.stem if out is None else Path(out)
    Run(path).check_new()
    resolved, tokenizer = resolve(read_recipe(file, dict(overrides or {})))
    return start_run(path, resolved, tokenizer, device, Console(stderr=True))


def start_run(path: Path, recipe: Recipe, tokenizer: Tokenizer, device: str, console: Console) -> TrainingResult:
    # Before the directory is created: an impossible model, or too little text, leaves no directory.
    model = recipe.model.build(recipe.train.seed, recipe.train.initialize)
    recipe.data.open("held-out")
    run = Run.create(path, recipe.to_dict(), tokenizer)
    return run_training(run, recipe, model, tokenizer, device, progress_listener(console))


def resume_run(path: Path, device: str, console: Console) -> TrainingResult:
    run = Run.open(path)
    recipe = Recipe.from_dict(run.config)
    model = recipe.model.build(recipe.train.seed, recipe.train.initialize)
    return run_training(run, recipe, model, Tokenizer.load(path / "tokenizer"), device, progress_listener(console))


def run_training(
    run: Run, recipe: Recipe, model: DecoderModule, tokenizer: Tokenizer, device: str, listener: Listener
) -> TrainingResult:
    held_out, warmup, steps = recipe.data.open("held-out"), recipe.train.schedule.warmup, recipe.train.steps
    if warmup > steps:
        listener.note(
            f"the warm-up of {warmup} steps is longer than the run of {steps}, so the learning rate stays below "
            f"{recipe.train.lr}; lower train.schedule.warmup"
        )
    trainer = Trainer(
        model.to(resolve_device(device)),
        recipe.data.loader(tokenizer),
        next_token,
        recipe.train,
        run,
        held_out=recipe.data.evaluation(tokenizer),
        sample=lambda _: sample_text(model, tokenizer, held_out),
        tokenizer=tokenizer,
        listener=listener,
    )
    return trainer.train()


def sample_text(
    model: DecoderModule, tokenizer: Tokenizer, source: DataSource, prompt_length: int = 32, max_new: int = 48
) -> str:
    """The beginning of the first held-out document and the model's greedy continuation."""
    prompt_length = min(prompt_length, (model.spec.context or 2 * prompt_length) // 2)
    ids = list(tokenize(source.document(0), tokenizer).ids[:prompt_length])
    tokens = Engine(model, rows=1).generate(ids, Sampling(max_new=max_new, temperature=0))
    return tokenizer.decode(ids + [token.id for token in tokens], special=True)
