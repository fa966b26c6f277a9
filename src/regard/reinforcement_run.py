"""Reinforcement learning in a run: the engine that samples, the reference, and the loader of rollouts.

The engine shares the weights of the model that is trained and is kept between rollouts. If the trainer computes in
bfloat16 with float32 weights, the engine has bfloat16 copies, which are written before every rollout: decoding is bound
by the bytes that it reads. Training does not import the engine: it gets a function that generates.
"""

import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace

import torch
from torch import nn

from regard.adapt.adapters import disable_adapters
from regard.data.batch import Batch
from regard.data.loader import Loader
from regard.data.sources.base import Splits
from regard.engine.engine import Engine
from regard.engine.request import GenerationError, Sampling
from regard.objectives.distillation import Distillation
from regard.objectives.reinforcement import Reinforcement
from regard.objectives.sequence_logprobs import TokenScores
from regard.spec import require
from regard.text.tokenizer import Tokenizer
from regard.training.loop import Trainer
from regard.training.on_policy import OnPolicyLoader
from regard.training.recipe import Recipe
from regard.training.rewards import load_reward
from regard.training.rollouts import HeldOutRewards, RolloutLoader, SampledCompletion, Scorer
from regard.training.start import build_model
from regard.training.step import autocast, compile_model

Score = Callable[[Batch, float], TokenScores]
GPU_ROWS = 512  # completions that are decoded at once
GPU_MEMORY = 0.3  # of what is free before the first step: the rest is for training


class EngineGenerator:
    """Completions by an engine that is built for the first of them.

    requests: at most, per call. dtype: in which the engine computes; None: that of the model, whose weights it shares.
    """

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, capacity: int, max_new: int, requests: int,
        dtype: torch.dtype | None = None,
    ):  # fmt: skip
        self.model, self.tokenizer, self.capacity, self.max_new = model, tokenizer, capacity, max_new
        self.requests, self.dtype = requests, dtype
        self.sampled = model  # the model itself, or its copy in another dtype
        self.engine: Engine | None = None

    def open(self) -> Engine:
        weight = next(self.model.parameters())
        if self.dtype not in (None, weight.dtype):
            self.sampled = deepcopy(self.model).requires_grad_(False).to(self.dtype)
        if weight.device.type != "cuda":
            return Engine(self.sampled, capacity=self.capacity, queue=self.requests)
        rows = min(self.requests, GPU_ROWS)
        return Engine(
            self.sampled, capacity=self.capacity, queue=self.requests, rows=rows, memory=GPU_MEMORY, compile=True
        )

    @torch.no_grad()
    def copy_weights(self) -> None:
        """Write the weights into the copy, in place: the engine has prepared decode steps with these tensors."""
        if self.sampled is not self.model:
            tensors = zip(self.sampled.state_dict().values(), self.model.state_dict().values(), strict=True)
            for copy, tensor in tensors:
                copy.copy_(tensor)

    def __call__(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], temperature: float
    ) -> list[SampledCompletion]:
        mode, collects = self.model.training, gc.isenabled()
        self.model.eval()
        gc.disable()  # every sampled token is an object: collections would take a tenth of the time, and find nothing
        try:
            if self.engine is None:
                self.engine = self.open()
            self.copy_weights()
            # Prefixes that an evaluation has cached were computed in other batches; a resumed run has none of them.
            self.engine.reset_prefix_cache()
            sampling = Sampling(max_new=self.max_new, temperature=temperature, stop_ids=self.tokenizer.stop_ids)
            requests = [
                self.engine.submit(ids, replace(sampling, seed=seed)) for ids, seed in zip(prompts, seeds, strict=True)
            ]
            while not self.engine.idle:
                self.engine.step()
        finally:
            self.model.train(mode)
            if collects:
                gc.enable()
        completions = []
        for request in requests:
            if request.error is not None:
                raise GenerationError(request.error)
            text = self.tokenizer.decode(request.output_ids)
            ids, logprobs = [token.id for token in request.new], [token.logprob for token in request.new]
            completions.append(SampledCompletion(ids, logprobs, text, request.finish == "length"))
        return completions


def with_rollouts(trainer: Trainer, recipe: Recipe, tokenizer: Tokenizer, splits: Splits) -> Trainer:
    """The trainer with a loader of rollouts, and with the rewards of held-out prompts as its evaluation."""
    objective, data, model = recipe.objective, recipe.data, trainer.model
    assert isinstance(objective, Reinforcement)
    check_sampling(trainer, recipe, objective)
    require(
        recipe.train.spike == 0,
        f"train.spike={recipe.train.spike:g} compares losses with their median, and those of {objective.kind} may be "
        "negative; set it to 0",
    )
    device = next(model.parameters()).device
    precision = autocast(recipe.train.precision, device)
    forward = compile_model(model, device, trainer.listener.note) if recipe.train.compile else model
    scorer = Scorer(forward, precision, recipe.train.accumulate)
    dtype = None if precision is nullcontext else torch.bfloat16
    generate = EngineGenerator(model, tokenizer, data.length, objective.max_new, data.rows * objective.updates, dtype)
    reference = reference_scorer(scorer, recipe) if objective.kl else None
    reward = load_reward(objective.reward, device, weights=objective.reward_weights)
    prompts = data.rows * objective.updates // objective.group
    trainer.listener.note(
        f"a rollout: {prompts} prompts, {objective.group} completions of each of at most {objective.max_new} tokens, "
        f"for {objective.epochs * objective.updates} steps; reward {objective.reward}"
    )
    loader = RolloutLoader(
        splits.train, objective, tokenizer, data.rows, data.length, generate, reward, scorer, reference, data.seed,
        trainer.listener.note,
    )  # fmt: skip
    held_out = () if splits.held_out is None else HeldOutRewards(loader, splits.held_out, data.held_out * data.rows)
    return replace(trainer, loader=loader, held_out=held_out, prefetch=0)


def with_samples(trainer: Trainer, recipe: Recipe, tokenizer: Tokenizer, splits: Splits) -> Trainer:
    """The trainer of an on-policy distillation: a share of its batches is sampled by the model."""
    objective, data = recipe.objective, recipe.data
    assert isinstance(objective, Distillation) and isinstance(trainer.loader, Loader)
    check_sampling(trainer, recipe, objective)
    precision = autocast(recipe.train.precision, next(trainer.model.parameters()).device)
    dtype = None if precision is nullcontext else torch.bfloat16
    generate = EngineGenerator(trainer.model, tokenizer, data.length, objective.max_new, data.rows, dtype)
    loader = OnPolicyLoader(trainer.loader, splits.train, objective, generate, trainer.listener.note)
    return replace(trainer, loader=loader, prefetch=0)


def check_sampling(trainer: Trainer, recipe: Recipe, objective: Reinforcement | Distillation) -> None:
    """Raise SpecError for settings with which the model cannot sample its batches."""
    require(
        recipe.data.length > objective.max_new,
        f"data.length={recipe.data.length} leaves no token for a prompt before objective.max_new={objective.max_new} "
        "new ones; raise data.length or lower max_new",
    )
    require(
        trainer.processes.mesh is None,
        f"objective {objective.kind} samples in one process, and {trainer.processes.count} were started; start one",
    )
    require(
        recipe.data.batch_warmup == 0 and recipe.train.length_warmup == 0,
        f"objective {objective.kind} samples its batches, which have no warm-up of their rows or lengths; set "
        "data.batch_warmup and train.length_warmup to 0",
    )


def reference_scorer(scorer: Scorer, recipe: Recipe) -> Score:
    """The log-probabilities of the model without its adapter, or of a frozen copy of the initial weights."""
    if recipe.adapter is not None:

        def without_adapter(batch: Batch, temperature: float) -> TokenScores:
            with disable_adapters(scorer.model):
                return scorer(batch, temperature)

        return without_adapter
    device = next(scorer.model.parameters()).device
    copy = build_model(recipe).to(device)
    return scorer._replace(model=copy.eval().requires_grad_(False))
