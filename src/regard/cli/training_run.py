"""Beginning and resuming a training run from the command line: the recipe's parts put into the one loop."""

from pathlib import Path

from rich.console import Console

from regard.cli.device import chosen
from regard.data.packing import tokenize
from regard.data.sources import DataSource
from regard.engine.engine import Engine
from regard.engine.request import Sampling
from regard.models.decoder import DecoderModule
from regard.objectives.next_token import next_token
from regard.text.tokenizer import Tokenizer
from regard.training.loop import Trainer, TrainingResult
from regard.training.progress import Listener, watch
from regard.training.recipe import Recipe
from regard.training.run import Run


def begin(path: Path, recipe: Recipe, tokenizer: Tokenizer, device: str, console: Console) -> TrainingResult:
    # Before the directory: a model that cannot be leaves nothing behind.
    model = recipe.model.build(recipe.train.seed, recipe.train.initialize)
    run = Run.create(path, recipe.to_dict(), tokenizer)
    return train(run, recipe, model, tokenizer, device, watch(console))


def go_on(path: Path, device: str, console: Console) -> TrainingResult:
    run = Run.open(path)
    recipe = Recipe.from_dict(run.config)
    model = recipe.model.build(recipe.train.seed, recipe.train.initialize)
    return train(run, recipe, model, Tokenizer.load(path / "tokenizer"), device, watch(console))


def train(
    run: Run, recipe: Recipe, model: DecoderModule, tokenizer: Tokenizer, device: str, listener: Listener
) -> TrainingResult:
    held_out = recipe.data.open("held-out")
    trainer = Trainer(
        model.to(chosen(device)),
        recipe.data.loader(tokenizer),
        next_token,
        recipe.train,
        run,
        held_out=recipe.data.evaluation(tokenizer),
        sample=lambda _: continuation(model, tokenizer, held_out),
        tokenizer=tokenizer,
        listener=listener,
    )
    return trainer.train()


def continuation(model: DecoderModule, tokenizer: Tokenizer, source: DataSource, given: int = 32, new: int = 48) -> str:
    """What the model makes of the beginning of the first held-out document, taking the likeliest tokens."""
    given = min(given, (model.spec.context or 2 * given) // 2)
    ids = list(tokenize(source.document(0), tokenizer).ids[:given])
    tokens = Engine(model, rows=1).generate(ids, Sampling(max_new=new, temperature=0))
    return tokenizer.decode(ids + [token.id for token in tokens], special=True)
