"""Training from a recipe: starting a run, resuming it.

regard.train("llama", out="runs/mine", overrides={"train.steps": 500})
regard.train(start="smollm2", data="chats.jsonl", overrides={"adapter.rank": 16}, out="runs/tuned")
regard.train(resume="runs/mine")
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from regard.compat import resolve_device
from regard.data.batch import Batch
from regard.data.loader import Loader
from regard.data.sources.base import DataSource, Examples, Splits
from regard.data.tokenization import Tokenization
from regard.engine.engine import Engine
from regard.engine.request import Sampling
from regard.models.decoder import DecoderModule
from regard.objectives.base import Objective
from regard.objectives.distillation import Distillation
from regard.objectives.next_token import NextToken
from regard.objectives.reinforcement import Reinforcement
from regard.planning.machine import check_memory
from regard.reinforcement_run import with_rollouts, with_samples
from regard.text.tokenizer import Tokenizer
from regard.training.base_model import check_weights, fingerprint_model, keep_base
from regard.training.loop import Trainer, TrainingResult
from regard.training.overrides import override, quoted
from regard.training.parallel.distribute import check_settings
from regard.training.parallel.mesh import (
    Processes,
    check_processes,
    is_restart,
    make_processes,
    process_count,
    process_group,
    process_rank,
)
from regard.training.parallel.shared_run import SharedRun
from regard.training.progress import Listener, progress_listener
from regard.training.recipe import Recipe, ResolvedRecipe, find_recipe, read_recipe, resolve
from regard.training.reference import AdapterReference, ReferenceLoader, ReferenceTable
from regard.training.resume_settings import resumed_config
from regard.training.run import Run
from regard.training.run_identity import TOKENIZER, RunIdentity
from regard.training.start import ModelFiles, build_model, start_files
from regard.training.step import autocast
from regard.training.teacher import load_teacher

FINE_TUNE = "finetune"  # the recipe for a start without one
FEW_EXAMPLES, FEW_TOKENS = 32, 1000  # in an evaluation


def train(
    recipe: str | Path | Recipe | Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    resume: str | Path | None = None,
    device: str | torch.device = "auto",
    start: str | Path | None = None,
    data: str | Path | None = None,
    extend: bool = False,
) -> TrainingResult:
    """Train a model from a recipe (a name such as "llama", a TOML file, a Recipe, or its tables), or resume a run.

    out: the run's directory; runs/NAME by default. overrides: values of the recipe by their dotted names; for a resumed
    run only settings such as train.steps and train.lr. start: the model to fine-tune (a run, a folder or a packaged
    name); without a recipe, the recipe "finetune" is used. data: a file or folder to train on, instead of the data of
    the recipe. extend: accept that the learning rate of a resumed run jumps if train.steps is raised.
    """
    check_arguments(overrides, out=out, resume=resume, start=start, data=data)
    console, device = Console(stderr=True), str(device)
    if extend and resume is None:
        raise ValueError("extend=True is for a resumed run: resume=RUN, overrides={'train.steps': N}")
    if resume is not None:
        if any(value is not None for value in (recipe, out, start, data)):
            raise ValueError(
                f"resume={resume!r} uses the directory and recipe of that run; remove recipe, out, start and data"
            )
        return resume_run(Path(resume), device, console, overrides, extend)
    name, tables = read_tables(recipe, dict(overrides or {}), start, data)
    path = Path("runs") / name if out is None else Path(out)
    if joins_run(path):
        return resume_run(path, device, console)
    Run(path).check_new()
    return start_run(path, resolve(tables), device, console)


def check_arguments(overrides: object, **paths: object) -> None:
    """Raise TypeError for arguments of `train` that are not the overrides or a path."""
    if overrides is not None and not (
        isinstance(overrides, Mapping) and all(isinstance(name, str) for name in overrides)
    ):
        raise TypeError(f"overrides={overrides!r:.80} is not a mapping of dotted names, such as {{'train.steps': 500}}")
    for name, path in paths.items():
        if not isinstance(path, str | Path | None):
            remedy = {
                "start": "; save the model and give its folder",
                "data": "; write the examples to a file, for example one JSON object per line to data.jsonl",
            }
            raise TypeError(f"{name} must be a path, not of type {type(path).__name__}{remedy.get(name, '')}")


def joins_run(path: Path) -> bool:
    """Whether this process trains in a run that another one creates, or that torchrun restarted after a failure."""
    return process_rank() > 0 or is_restart() and Run(path).config_file.exists()


def read_tables(
    recipe: str | Path | Recipe | Mapping[str, Any] | None,
    overrides: Mapping[str, Any],
    start: str | Path | None = None,
    data: str | Path | None = None,
) -> tuple[str, dict[str, Any]]:
    """The name of a recipe, and its tables with the overrides, the model to start from and the path of the data."""
    if recipe is None and start is None:
        raise ValueError("give a recipe (regard train llama), a model to start from (--from), or a run to --resume")
    overrides = dict(overrides) | path_overrides(start, data)
    if isinstance(recipe, Recipe):
        return "recipe", override(recipe.to_dict(), overrides)
    if isinstance(recipe, Mapping):
        return "recipe", override(recipe, overrides)
    if not isinstance(recipe, str | Path | None):
        raise TypeError(
            f"recipe is a {type(recipe).__name__}, not a recipe's name or TOML file; for a spec, write a recipe: "
            "regard.Recipe(spec, regard.Training(steps=1000))"
        )
    file = find_recipe(FINE_TUNE if recipe is None else recipe)
    tables = read_recipe(file, overrides)
    if recipe is None and not {"path", "source", "sources"} & set(tables["data"]):
        raise ValueError(f"there are no data to fine-tune {start} on; give a file or folder: --data chats.jsonl")
    return file.stem, tables


def path_overrides(start: str | Path | None, data: str | Path | None) -> dict[str, str]:
    """The model to start from and the path of the data as overrides; the name of a file may look like a number."""
    return ({} if start is None else {"from": str(start)}) | ({} if data is None else {"data.path": quoted(str(data))})


def start_run(path: Path, resolved: ResolvedRecipe, device: str, console: Console) -> TrainingResult:
    recipe, tokenizer, splits = resolved
    device = resolve_device(device)
    check_recipe(recipe, device)
    check_outside_data(path, recipe.data.sources)
    # before the directory is created: an impossible model, or a pattern that matches no parameter, leaves no directory
    model = build_model(recipe)
    recipe.train.build_optimizer(model)
    base = None if recipe.start is None else fingerprint_model(Path(recipe.start))
    run = Run.create(path, recipe.to_dict(), start_files(recipe, tokenizer), base)
    references = [keep_base(run, checkpoint) for checkpoint in needed_checkpoints(recipe)]
    try:
        with process_group(device) as own_device:  # other processes wait here until the run exists
            return run_training(run, recipe, model, tokenizer, splits, own_device, progress_listener(console))
    except Exception:
        run.discard_unused()  # so that the corrected command finds no run in its way
        for reference in references:
            if reference is not None and not run.config_file.exists():
                reference.unlink(missing_ok=True)  # two of them may be one, as a teacher that the run starts from
        raise


def needed_checkpoints(recipe: Recipe) -> list[Path]:
    """The models that a resumed run loads: the base of an adapter or reference, a teacher, and a reward model."""
    objective, needed = recipe.objective, []
    with_reference = objective is not None and (objective.needs_reference or getattr(objective, "kl", 0) > 0)
    if recipe.start is not None and (recipe.adapter is not None or with_reference):
        needed.append(Path(recipe.start))
    if isinstance(objective, Distillation):
        needed.append(Path(objective.teacher))
    if isinstance(objective, Reinforcement) and objective.reward_weights:
        needed.append(Path(objective.reward))
    return needed


def check_recipe(recipe: Recipe, device: str) -> None:
    """Raise ValueError if the processes cannot share the batch, or the memory of this machine is too small."""
    check_processes(recipe.train.parallel, recipe.data.least_rows)
    assert recipe.objective is not None, "a resolved recipe has an objective"
    check_settings(recipe.train, recipe.objective.scope, Processes(recipe.train.parallel.resolve(process_count())))
    if recipe.adapter is not None and recipe.adapter.base is not None and process_count() > 1:
        raise ValueError(
            "adapter.base is for one process: a base in few bits is not distributed; start one, or omit it"
        )
    if recipe.objective.alternates and process_count() > 1:
        raise ValueError(f"objective {recipe.objective.kind} freezes a part of the model in each step; use one process")
    if recipe.quantize is not None and process_count() > 1:
        raise ValueError("[quantize] is for one process: weights in parts would be rounded by other scales; start one")
    trained = None if recipe.adapter is None else 0  # adapters are too small to matter here
    check_memory(recipe.model, recipe.train, device, recipe.data.rows, recipe.data.length, trained, process_count())


def check_outside_data(path: Path, sources: Sequence[DataSource]) -> None:
    """Raise ValueError if the run is in a folder of its data: its files would become examples."""
    for source in sources:
        folder = getattr(source, "path", None)
        if folder is not None and Path(folder).is_dir() and path.resolve().is_relative_to(Path(folder).resolve()):
            raise ValueError(
                f"the run {path} is inside of its data {folder}, and its files would change the data; choose another "
                "directory with --out"
            )


def resume_run(
    path: Path, device: str, console: Console, overrides: Mapping[str, Any] | None = None, extend: bool = False
) -> TrainingResult:
    listener = progress_listener(console) if process_rank() == 0 else Listener()
    with process_group(resolve_device(device)) as own_device:
        run = Run.open(path)
        run.check_files()
        config, changes = resumed_config(run, overrides or {}, extend, listener.note)
        recipe = Recipe.from_dict(config)
        if recipe.model.kind in ("medusa", "eagle"):
            raise ValueError(f"{path} trains a drafter; resume it with the same command: regard speculate train")
        recipe.train.check_rows(recipe.data.least_rows)  # before the change is recorded
        check_recipe(recipe, str(own_device))
        tokenizer, splits = Tokenizer.load(path / TOKENIZER), recipe.data.open()
        from_checkpoint, needed = bool(run.checkpoints), needed_checkpoints(recipe)
        if recipe.start is not None and (not from_checkpoint or Path(recipe.start) in needed):
            check_weights(Path(recipe.start), RunIdentity.read(run.path).base, run.path)
        if process_rank() == 0:
            for checkpoint in needed:  # the start may have been killed before they were kept
                keep_base(run, checkpoint)
        model = build_model(recipe, from_checkpoint)
        return run_training(run, recipe, model, tokenizer, splits, own_device, listener, changes)


def run_training(
    run: Run,
    recipe: Recipe,
    model: nn.Module,
    tokenizer: Tokenizer,
    splits: Splits,
    device: torch.device,
    listener: Listener,
    overrides: Mapping[str, Any] | None = None,
) -> TrainingResult:
    warmup, steps = recipe.train.schedule.warmup, recipe.train.steps
    if warmup > steps:
        listener.note(
            f"the warm-up of {warmup} steps is longer than the run of {steps}, so the learning rate stays below "
            f"{recipe.train.lr}; lower train.schedule.warmup"
        )
    if recipe.train.length_warmup > steps:
        listener.note(
            f"the warm-up of the length is {recipe.train.length_warmup} steps, longer than the run of {steps}, so rows "
            f"never have all of their {recipe.data.length} tokens; lower train.length_warmup"
        )
    assert recipe.objective is not None, "a resolved recipe has an objective"
    listener.note(
        f"{run.path}: {recipe.model.kind}, objective {recipe.objective.kind}, data {splits.train.name}\n"
        f"recipe: {run.config_file}"
    )
    if splits.held_out is not None and recipe.objective.needs_other and splits.held_out.count == 1:
        splits = splits._replace(held_out=None)
    if recipe.data.held_out and splits.held_out is None:
        listener.note(f"{splits.train.name}: too few examples to hold some out; there is no evaluation")
    processes = make_processes(recipe.train.parallel, device)
    run = run if processes.mesh is None else SharedRun(run.path, processes)
    trainer = build_trainer(run, recipe, model.to(device), tokenizer, splits, listener, processes)
    if splits.held_out is not None and not recipe.objective.needs_rollouts:
        listener.note(describe_held_out(list(trainer.held_out), recipe.objective, processes))
    return replace(trainer, overrides=overrides or {}).train()


def describe_held_out(batches: Sequence[Batch], objective: Objective, processes: Processes) -> str:
    """The size of an evaluation, with a warning if it is small."""
    if not batches:
        return "held out: too few examples for a batch; there is no evaluation"
    unit, few = ("tokens", FEW_TOKENS) if objective.packed else ("examples", FEW_EXAMPLES)
    size = processes.row_ranks * sum(batch.token_count if objective.packed else batch.size for batch in batches)
    warning = f"; scores of fewer than {few:,} {unit} vary much by chance, use more data" if size < few else ""
    return f"held out: {size:,} {unit if size > 1 else unit.removesuffix('s')}{warning}"


def build_trainer(
    run: Run,
    recipe: Recipe,
    model: nn.Module,
    tokenizer: Tokenizer,
    splits: Splits,
    listener: Listener,
    processes: Processes | None = None,
) -> Trainer:
    data, objective, held_out = recipe.data, recipe.objective, splits.held_out
    assert objective is not None, "a resolved recipe has an objective"
    processes = processes or Processes()

    def loader(examples: Examples, warmup: int = 0) -> Loader:
        ranks = (processes.row_rank, processes.row_ranks)
        return Loader(examples, objective, tokenizer, data.rows, data.length, data.seed, *ranks, warmup)

    evaluated = held_out if not objective.needs_rollouts else None  # rollouts have an evaluation of their own
    can_sample = isinstance(model, DecoderModule) and isinstance(objective, NextToken) and held_out is not None
    trainer = Trainer(
        model,
        loader(splits.train, data.batch_warmup),
        objective,
        recipe.train,
        run,
        held_out=list(loader(evaluated).without_repetition(data.held_out)) if evaluated is not None else (),
        sample=(lambda _: sample_text(model, tokenizer, objective, held_out)) if can_sample else None,
        tokenizer=ModelFiles.read(tokenizer, run.path / TOKENIZER),
        base=recipe.start,
        source_family=recipe.source_family,
        with_head=recipe.train_head,
        listener=listener,
        prefetch=data.prefetch,
        processes=processes,
    )
    if objective.needs_rollouts:
        return with_rollouts(trainer, recipe, tokenizer, splits)
    if isinstance(objective, Distillation):
        device = next(model.parameters()).device
        taught = replace(trainer, objective=load_teacher(objective, recipe.model, tokenizer, device))
        return with_samples(taught, recipe, tokenizer, splits) if objective.on_policy else taught
    if not objective.needs_reference:
        return trainer
    if recipe.adapter is not None:
        return replace(trainer, objective=AdapterReference(objective))
    batches = islice(loader(splits.train, data.batch_warmup), recipe.train.steps)
    return with_reference_table(trainer, recipe, batches)


def with_reference_table(trainer: Trainer, recipe: Recipe, batches: Iterable[Batch]) -> Trainer:
    """The trainer with the log-probabilities under the initial weights in all `batches` and held-out batches."""
    run, listener, held_out = trainer.run, trainer.listener, list(trainer.held_out)
    device, rank = next(trainer.model.parameters()).device, trainer.processes.row_rank
    total = recipe.train.steps + len(held_out)
    parts = (lambda: build_model(recipe).to(device), autocast(recipe.train.precision, device))
    if run.config_file.exists():
        file = run.path / ("reference.safetensors" if rank == 0 else f"reference-{rank}.safetensors")
        table = ReferenceTable(*parts, file, json.dumps(RunIdentity.read(run.path).stamp()))
        table.complete(
            chain(held_out, batches),
            None if run.checkpoints else trainer.model,
            lambda done: listener.prepared("log-probabilities of the reference", done, total),
        )
    else:  # the learning rate finder has no run, and reads other numbers of batches
        table = ReferenceTable(*parts)
    return replace(
        trainer, loader=ReferenceLoader(trainer.loader, table), held_out=[table.add_to(batch) for batch in held_out]
    )


def sample_text(
    model: DecoderModule,
    tokenizer: Tokenizer,
    objective: Objective,
    examples: Examples,
    prompt_length: int = 32,
    max_new: int = 48,
) -> str:
    """The beginning of the first held-out example and the model's greedy continuation."""
    prompt_length = min(prompt_length, (model.spec.context or 2 * prompt_length) // 2)
    ids = examples.map(Tokenization(objective, tokenizer)).example(0)["ids"][:prompt_length].tolist()
    tokens = Engine(model, rows=1).generate(ids, Sampling(max_new=max_new, temperature=0))
    return tokenizer.decode(ids + [token.id for token in tokens], special=True)
