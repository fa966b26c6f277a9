"""Training of drafters for speculative decoding: Medusa heads, or a draft layer of EAGLE, on a frozen decoder.

train_drafter("runs/demo", "drafts/demo", "medusa", data="stories.txt")

The state of training is a run beside the output, OUT-training, so that the same call resumes it. The drafter is written
with the fingerprint of the model's weights, and its acceptance is measured in an engine, on held-out text.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

from rich.console import Console

from regard.checkpoint.atomic_folder import check_new
from regard.compat import resolve_device
from regard.data.loader import Loader
from regard.data.sources.base import Examples
from regard.data.tokenization import Tokenization
from regard.drafter_folder import as_drafter, save_drafter
from regard.engine.engine import Engine
from regard.engine.request import Sampling
from regard.engine.speculation.draft_length import DraftCosts
from regard.engine.speculation.speculation import Drafter
from regard.engine.speculation.statistics import SpeculationStatistics
from regard.models.decoder import DecoderModule
from regard.models.eagle import EagleLayer, EagleLayerModule
from regard.models.medusa import MedusaHeads, MedusaHeadsModule
from regard.objectives.base import LossFunction, Objective
from regard.objectives.drafting import EagleLoss, MedusaLoss
from regard.objectives.next_token import NextToken
from regard.spec import require
from regard.text.tokenizer import Tokenizer
from regard.training.base_model import check_weights, fingerprint_model
from regard.training.loop import Trainer
from regard.training.progress import progress_listener
from regard.training.recipe import Recipe, find_recipe, read_recipe, resolve
from regard.training.run import Run
from regard.training.run_identity import RunIdentity
from regard.training.start import load_start
from regard.training_run import FINE_TUNE, path_overrides

DraftMethod = Literal["medusa", "eagle"]
DEFAULTS = {"train.steps": 1000, "train.lr": 1e-3, "train.evaluate_every": 250, "train.save_every": 250}
MOST_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 16, 64, 64  # of the measurement


def train_drafter(
    model: str | Path,
    out: str | Path,
    method: DraftMethod,
    overrides: Mapping[str, Any] | None = None,
    data: str | Path | None = None,
    heads: int = 4,
    shared: bool = False,
    device: str = "auto",
) -> SpeculationStatistics | None:
    """Train a drafter for a decoder and write it to the folder `out`; returns its acceptance on held-out text.

    None: training was interrupted. overrides: of the recipe `finetune`, such as train.steps and data.rows.
    heads: of medusa, which also `shared` is for: they use the head of the decoder.
    """
    out = Path(out)
    check_new(out)
    require(
        method in get_args(DraftMethod),
        f"method={method!r} is unknown; choose one of {', '.join(get_args(DraftMethod))}",
    )
    recipe, tokenizer, splits = resolve(
        read_recipe(find_recipe(FINE_TUNE), DEFAULTS | path_overrides(model, data) | dict(overrides or {}))
    )
    assert recipe.start is not None
    target = load_start(Path(recipe.start))
    if not isinstance(target, DecoderModule) or not isinstance(recipe.objective, NextToken):
        raise ValueError(
            f"{model} is of kind {recipe.model.kind}; drafters are trained for decoders that predict tokens"
        )
    target = target.requires_grad_(False).eval().to(resolve_device(device))
    drafter = build_drafter(target, method, heads, shared, recipe.train.seed)
    fingerprint, console = fingerprint_model(Path(recipe.start)), Console(stderr=True)
    run = open_run(out.with_name(f"{out.name}-training"), replace(recipe, model=drafter.spec), fingerprint)
    try:
        trainer = Trainer(
            drafter, loader(recipe, splits.train, tokenizer), loss_of(target, method), recipe.train, run,
            held_out=held_out_batches(recipe, splits.held_out, tokenizer), listener=progress_listener(console),
            prefetch=recipe.data.prefetch, resumed_by="the same command",
        )  # fmt: skip
        finished = trainer.train().finished
    except Exception:
        run.discard_unused()  # so that the corrected command finds no other training in its way
        raise
    if not finished:
        return None
    save_drafter(drafter, out, fingerprint)
    count = min(MOST_PROMPTS, max(1, recipe.data.held_out * recipe.data.rows))
    prompts = prompts_of(splits.held_out or splits.train, count, recipe.objective, tokenizer)
    return measure_acceptance(target, as_drafter(drafter), prompts)


def build_drafter(
    target: DecoderModule, method: DraftMethod, heads: int, shared: bool, seed: int
) -> MedusaHeadsModule | EagleLayerModule:
    device = next(target.parameters()).device
    if method == "eagle":
        return EagleLayer.of(target.spec).build(seed).to(device)
    built = MedusaHeads.of(target.spec, heads, shared).build(seed).to(device)
    built.copy_head(target)
    return built


def loss_of(target: DecoderModule, method: DraftMethod) -> LossFunction:
    return MedusaLoss(target) if method == "medusa" else EagleLoss(target)


def open_run(path: Path, recipe: Recipe, fingerprint: str) -> Run:
    """The run of an interrupted training of the same recipe, or a new one."""
    run = Run(path)
    if not run.config_file.exists():
        return Run.create(path, recipe.to_dict(), base=fingerprint)
    if run.config != recipe.to_dict():
        raise ValueError(
            f"{path} has the state of a training with other settings; give the same, or delete it to start again"
        )
    check_weights(Path(recipe.start or ""), RunIdentity.read(path).base, path)
    return run


def loader(recipe: Recipe, examples: Examples, tokenizer: Tokenizer) -> Loader:
    data, objective = recipe.data, recipe.objective
    assert objective is not None, "a resolved recipe has an objective"
    return Loader(examples, objective, tokenizer, data.rows, data.length, data.seed, warmup=data.batch_warmup)


def held_out_batches(recipe: Recipe, examples: Examples | None, tokenizer: Tokenizer) -> list:
    if examples is None:
        return []
    return list(loader(recipe, examples, tokenizer).without_repetition(recipe.data.held_out))


def prompts_of(examples: Examples, count: int, objective: Objective, tokenizer: Tokenizer) -> list[list[int]]:
    """The beginnings of the first examples."""
    encoded = examples.map(Tokenization(objective, tokenizer))
    count = count if examples.count is None else min(count, examples.count)
    ids = (encoded.example(i)["ids"].tolist() for i in range(count))
    return [ids[: min(PROMPT_TOKENS, max(1, len(ids) // 2))] for ids in ids]


def measure_acceptance(
    target: DecoderModule, drafter: Drafter, prompts: list[list[int]], draft_tokens: int = 5
) -> SpeculationStatistics:
    """Continue the prompts greedily, with drafts of full length."""
    engine = Engine(target, rows=len(prompts), speculation=drafter, draft_tokens=draft_tokens)
    assert engine.speculation is not None
    engine.speculation.costs = DraftCosts(1.0, 0.0)  # a draft costs nothing, so every draft is as long as possible
    for ids in islice(prompts, engine.store.rows):
        ids = ids[: max(1, engine.capacity // 2)]
        engine.submit(ids, Sampling(max_new=min(NEW_TOKENS, engine.capacity - len(ids)), temperature=0))
    while not engine.idle:
        engine.step()
    return engine.speculation.statistics
