"""A recipe: the complete description of a training run, in one TOML file.

    from         the model to start from: a run, a folder, or the name of a packaged model; or
    [model]      the spec of a new model; the size of its vocabulary is by default that of the tokenizer
    [head]       a new head for the model of `from`; a decoder becomes an encoder with causal masks
    [adapter]    train low-rank adapters instead of all weights; with [head], also the whole new head
    [quantize]   quantization-aware training: round the weights of linear layers in every forward
    [objective]  the training objective; by default the one for the kind of model
    [data]       the sources of the examples, and the size of the batches
    [tokenizer]  the tokenizer, and how it is trained; with `from`, that of the model
    [train]      steps, learning rate, schedule, optimizer

Values can be overridden by dotted names (`train.lr=3e-4`, `model.layers.0.times=6`). The resolved recipe is saved with
the run.
"""

import dataclasses
import re
import tomllib
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from regard.adapt.fake_quantized import FakeQuantization
from regard.adapt.lora import LoRA
from regard.checkpoint.model_folder import read_source_family
from regard.checkpoint.sentence_transformers import without_sentence_head
from regard.data.loader import MOST_PARTS, warmup_parts
from regard.data.sources.base import Splits
from regard.families import can_express
from regard.models.base import Model, Scheme
from regard.models.encoder import Encoder
from regard.models.generative.base import Generative
from regard.models.pattern import retile
from regard.models.value_head import with_value_head
from regard.objectives.base import Objective
from regard.objectives.defaults import check_pair, default_objective
from regard.spec import Spec, SpecError, parse_spec, require, suggest_name, toml_lines, without_defaults
from regard.text.tokenizer import Tokenizer
from regard.text.tokenizer_folder import has_tokenizer
from regard.training.base_model import pad_of, read_spec, root_of
from regard.training.data_settings import Data, Vocabulary, read_data_table, with_absolute_paths, with_image_size
from regard.training.new_head import with_new_head
from regard.training.optimizer import AdamW, Optimizer
from regard.training.overrides import override
from regard.training.parallel.mesh import Parallel
from regard.training.parameter_groups import LRScale, freeze, learning_rate_scales
from regard.training.rewards import with_reward_path
from regard.training.run import newest_checkpoint
from regard.training.schedule import Cosine, Schedule
from regard.training.teacher import with_teacher_path

FINE_TUNING_LENGTH = 512  # of rows, for a model that has at least this context
RECIPES = Path(__file__).parents[1] / "recipes"
FULL_RATE = 0.1  # the learning rate of all weights, over that of an adapter
# The fields of a model's spec that hold the size of the vocabulary, by its kind.
VOCAB_FIELDS = {
    "decoder": ("vocab",),
    "encoder": ("input.vocab",),
    "encoder_decoder": ("source.input.vocab", "target.vocab"),
    "seq2seq": ("source.input.vocab", "target.vocab"),
    "dual_encoder": ("text.input.vocab",),
    "interleaved": ("decoder.vocab",),
}


@dataclass(frozen=True)
class Training(Spec):
    """The settings of the training loop; every batch of the loader is one step."""

    steps: int
    lr: float = 1e-3  # the peak of the schedule
    seed: int = 0
    initialize: Scheme = "fan_in"  # the distribution of the initial weights (models/base.py)
    schedule: Schedule = Cosine(warmup=100)
    optimizer: Optimizer = AdamW()
    layer_decay: float = 1.0  # factor of the learning rate per layer, from the last one down; 1: the same in all
    lr_scales: tuple[LRScale, ...] = ()  # factors of the learning rate by patterns of parameter names
    freeze: tuple[str, ...] = ()  # patterns of the names of parameters that are not trained
    ema: float = 0.0  # decay of the moving average of the weights, e.g. 0.999; 0: none
    length_warmup: int = 0  # steps in which rows are cut into shorter ones: 8 parts, then 4, then 2, for a third each
    accumulate: int = 1  # micro-batches per step, to save memory; the loss does not change
    clip: float = 1.0  # largest norm of the gradient; 0: no clipping
    # auto: bfloat16 autocast on CUDA, else float32; fp8: also 8-bit products in wide linear layers, with compile=true
    precision: Literal["auto", "float32", "bfloat16", "fp8"] = "auto"
    compile: bool = False
    checkpoint_activations: tuple[str, ...] = ()  # patterns of modules that run again in the backward, to save memory
    nonfinite: Literal["stop", "skip", "roll_back"] = "stop"  # for a loss or gradient that is not finite (faults.py)
    spike: float = 0.0  # a loss above this factor of the recent median is treated like one that is not finite; 0: off
    evaluate_every: int = 250  # steps; 0: at the end only
    save_every: int = 250  # steps; 0: at the end only
    keep: int = 2  # newest checkpoints, beside the best; with two or more, a damaged one has a predecessor
    async_save: bool = True  # write checkpoints while training continues
    monitor_every: int = 0  # steps between measurements of every layer (monitor.py); 0: none
    parallel: Parallel = Parallel()  # how the processes that torchrun started are used

    def check(self) -> None:
        for name in ("steps", "accumulate", "keep"):
            require(getattr(self, name) >= 1, f"training: {name}={getattr(self, name)} must be at least 1")
        for name in ("clip", "evaluate_every", "save_every", "monitor_every", "length_warmup"):
            require(getattr(self, name) >= 0, f"training: {name}={getattr(self, name)} must not be negative")
        require(abs(self.seed) < 2**63, f"training: seed={self.seed} must have at most 63 bits")
        require(self.lr > 0, f"training: lr={self.lr} must be positive")
        require(self.spike == 0 or self.spike > 1, f"training: spike={self.spike} must be 0 (off) or more than 1")
        require(0 < self.layer_decay <= 1, f"training: layer_decay={self.layer_decay} must be in (0, 1]")
        require(0 <= self.ema < 1, f"training: ema={self.ema} must be in [0, 1)")

    def check_rows(self, rows: int) -> None:
        """Raise SpecError if batches of this many rows cannot be split into micro-batches."""
        require(
            rows % self.accumulate == 0,
            f"train.accumulate={self.accumulate} does not divide the {rows} rows of a batch; use a divisor",
        )

    def row_parts(self, done: int) -> int:
        """The number of parts into which the rows of a batch are cut after `done` steps."""
        return warmup_parts(done, self.length_warmup)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Freeze the parameters that are not trained; returns the optimizer of the others."""
        freeze(model, self.freeze)
        scales = learning_rate_scales(model, self.layer_decay, self.lr_scales)
        return self.optimizer.build(model, self.lr, scales)


@dataclass(frozen=True)
class Recipe(Spec):
    model: Model
    train: Training
    data: Data = Data()
    tokenizer: Vocabulary = Vocabulary()
    objective: Objective | None = None  # None: the one for the kind of model (objectives/defaults.py)
    start: str | None = None  # `from` in files: the folder of the initial weights
    adapter: LoRA | None = None  # None: all weights are trained
    train_head: bool = False  # beside the adapter; true with [head]
    quantize: FakeQuantization | None = None  # round the weights of linear layers in every forward
    source_family: str | None = None  # that of the initial weights, which an export writes by default

    def check(self) -> None:
        require(
            self.quantize is None or self.adapter is None,
            "[quantize] rounds weights that are trained, and [adapter] freezes them; remove one, or set adapter.base",
        )
        has_head = isinstance(self.model, Encoder) and self.model.head is not None
        require(
            not self.train_head or self.adapter is not None and has_head,
            "train_head=true trains the head of an encoder beside an adapter, and this recipe has "
            f"{'no adapter' if has_head else 'no encoder with a head'}; leave it out",
        )

    def to_dict(self) -> dict[str, Any]:
        return rename(super().to_dict(), "start", "from")

    def to_toml(self, defaults: bool = False) -> str:
        text = super().to_toml(defaults)
        return text if self.start is None else re.sub("^start = ", "from = ", text, count=1, flags=re.MULTILINE)

    def with_defaults(self) -> str:
        """TOML in which only the parts of the model leave out their defaults."""
        return "\n".join(toml_lines(self.to_dict() | {"model": without_defaults(self.model)})) + "\n"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Recipe":
        return super().from_dict(rename(data, "from", "start"))


def rename(table: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    return {new if key == old else key: value for key, value in table.items()}


class ResolvedRecipe(NamedTuple):
    recipe: Recipe
    tokenizer: Tokenizer
    splits: Splits


def find_recipe(name: str | Path) -> Path:
    """The path of a recipe file, or of the package's recipe of this name."""
    path, packaged = Path(name), RECIPES / f"{name}.toml"
    if path.is_file() or not packaged.is_file():
        names = [recipe.stem for recipe in RECIPES.glob("*.toml")]
        require(
            path.is_file(), f"there is no recipe {name}; use a TOML file, or a name: {suggest_name(str(name), names)}"
        )
        return path
    return packaged


def read_recipe(path: Path, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The tables of a recipe file, with the overrides applied."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} is not TOML: {error}") from error
    return override(tables, overrides or {})


def train_all_weights(tables: Mapping[str, Any], keep_rate: bool) -> dict[str, Any]:
    """The tables of a recipe without its adapter. Its learning rate is lowered as well, unless it is to be kept."""
    if "adapter" not in tables:
        return dict(tables)
    train = tables["train"] if keep_rate else {**tables["train"], "lr": tables["train"]["lr"] * FULL_RATE}
    return {name: table for name, table in tables.items() if name != "adapter"} | {"train": train}


def resolve(
    tables: Mapping[str, Any], tokenizer: Tokenizer | None = None, pattern: str | None = None
) -> ResolvedRecipe:
    """The checked recipe with its tokenizer and its data. If no tokenizer is given, it is trained.

    pattern: replaces the layers of the model (models/pattern.py).
    """
    # mistakes are reported before the data are read and the tokenizer is trained, which may take minutes
    draft, tables = draft_recipe(tables, pattern)
    splits = draft.data.open()
    assert draft.objective is not None
    if tokenizer is None:
        tokenizer = draft.tokenizer.build(splits, draft.objective.special_tokens)
    draft.objective.prepare_tokenizer(tokenizer)
    # the recipe of prepared data has the objective that was fitted to the examples
    objective = draft.objective if draft.data.prepared else draft.objective.fit(splits, draft.model)
    recipe = build_recipe(
        tables | {"objective": objective.to_dict()},
        tokenizer.vocab_size,
        pattern,
        objective.head_options,
        objective.model_options(tokenizer),
    )
    check_vocabulary(recipe.model, tokenizer, objective)
    if recipe.source_family is not None and not can_express(
        recipe.source_family, without_sentence_head(recipe.model)
    ):  # a new head
        recipe = replace(recipe, source_family=None)
    return ResolvedRecipe(recipe, tokenizer, splits)


def draft_recipe(tables: Mapping[str, Any], pattern: str | None = None) -> tuple[Recipe, dict[str, Any]]:
    """The recipe with a vocabulary of one token, checked without its data, and its tables with the model's spec."""
    known = ("kind", "from", "head", *(field.name for field in dataclasses.fields(Recipe)))
    for key in tables:
        require(key in known, f"a recipe has no table {key!r}; {suggest_name(key, known)}")
    tables = dict(tables)
    if isinstance(tables.get("data"), Mapping):
        tables["data"] = read_data_table(tables["data"])
    start = tables.get("from", tables.get("start"))
    if start is not None:
        require(isinstance(start, str | Path), f"from={start!r:.80} is not the path or the name of a model")
        tables = tables_from(Path(start), tables)
    require(
        start is not None or tables.get("adapter") is None,
        "[adapter] trains low-rank matrices beside the frozen weights of a model, and a new model has random ones; set "
        "`from` (--from MODEL), or remove the adapter",
    )
    require("head" not in tables, "[head] is a new head for the model of `from`; set model.head of a new model")
    return build_recipe(tables, vocab=1, pattern=pattern), tables


def tables_from(start: Path, tables: Mapping[str, Any]) -> dict[str, Any]:
    """The tables with the spec and the tokenizer of the model to start from."""
    for key in ("model", "tokenizer"):
        require(key not in tables, f"the recipe has both `from` and [{key}], but it comes with the model; remove one")
    folder = newest_checkpoint(start)
    root = root_of(folder)
    model, head = read_spec(folder), tables.get("head")
    if head is not None and tables.get("adapter") is not None:
        tables = {**tables, "train_head": True}
    return {key: value for key, value in tables.items() if key not in ("from", "head")} | {
        "start": str(folder.absolute()),
        "model": model.to_dict() if head is None else with_new_head(model, head, pad_of(root)),
        # a model of images has none
        "tokenizer": {"by": "folder", "path": str(root.absolute())} if has_tokenizer(root) else {"by": "byte"},
        "source_family": read_source_family(root),
    }


def build_recipe(
    tables: Mapping[str, Any],
    vocab: int,
    pattern: str | None = None,
    head: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Recipe:
    """The checked recipe. `vocab`, other `options`, and `head` with its number of labels are used if the model's table
    has none."""
    model, objective = tables.get("model", {}), tables.get("objective")
    if isinstance(objective, Mapping):
        if "kind" not in objective and isinstance(model, Mapping):
            spec = parse_spec(fill_model({"kind": "decoder"} | dict(model), vocab, {"labels": 1}), "model", Model)
            assert isinstance(spec, Model)
            objective = {"kind": default_objective(spec).kind, **objective}
            tables = {**tables, "objective": objective}
        objective = parse_spec(objective, "objective", Objective)
    if isinstance(model, Mapping):
        head = head or getattr(objective, "head_options", None) or {"labels": 1}
        model = fill_model({"kind": "decoder", **(options or {}), **model}, vocab, head)
        if isinstance(tables.get("data"), Mapping):
            tables = {**tables, "data": with_image_size(tables["data"], model)}
    recipe = Recipe.from_dict({**tables, "model": model})
    if pattern is not None:
        recipe = replace(recipe, model=retile(recipe.model, pattern))
    if recipe.objective is not None and recipe.objective.needs_values:
        recipe = replace(recipe, model=with_value_head(recipe.model))
    context = context_of(recipe.model)
    data = tables.get("data", {})
    if isinstance(data, Mapping) and "length" not in data:
        length = Data.length if recipe.start is None else FINE_TUNING_LENGTH
        recipe = replace(recipe, data=replace(recipe.data, length=min(length, context or length)))
    objective = recipe.objective or default_objective(recipe.model)
    check_pair(objective, recipe.model)
    recipe.train.check_rows(recipe.data.rows)
    require(
        recipe.train.length_warmup == 0 or objective.packed and recipe.data.length % MOST_PARTS == 0,
        f"train.length_warmup cuts packed rows into up to {MOST_PARTS} parts; {objective.kind} with data.length="
        f"{recipe.data.length} has no such rows; set it to 0, or data.length to a multiple of {MOST_PARTS}",
    )
    parts = MOST_PARTS * recipe.train.accumulate
    require(
        recipe.data.batch_warmup == 0 or recipe.data.rows % parts == 0,
        f"data.batch_warmup starts with an eighth of data.rows={recipe.data.rows}, which train.accumulate="
        f"{recipe.train.accumulate} does not divide; set data.rows to a multiple of {parts}",
    )
    require(
        objective.scope == "token" or recipe.data.least_rows > 1,
        f"objective {objective.kind} compares the rows of a batch, and a batch has {recipe.data.least_rows}; raise "
        "data.rows",
    )
    require(
        context is None or recipe.data.length <= context,
        f"data.length={recipe.data.length} is longer than model.context={context}; lower data.length or raise the "
        "context",
    )
    objective = with_reward_path(with_teacher_path(objective))
    return replace(recipe, objective=objective, data=with_absolute_paths(recipe.data))


def fill_model(model: Mapping[str, Any], vocab: int, head: Mapping[str, Any]) -> dict[str, Any]:
    """The table of a model with the values that depend on the data."""
    filled = deepcopy(dict(model))
    for name in VOCAB_FIELDS.get(str(filled["kind"]), ()):
        table: Any = filled
        for key in name.split(".")[:-1]:
            default = {"kind": "tokens"} if key == "input" else {}
            table = table.setdefault(key, default) if isinstance(table, dict) else None
        if isinstance(table, dict) and table.get("kind") not in ("patches", "frames"):
            table.setdefault("vocab", vocab)
    if filled["kind"] == "interleaved":
        filled.setdefault("marker", 0)  # until there is a tokenizer
    if isinstance(filled.get("head"), dict) and filled["head"].get("kind") in ("classification", "distilled"):
        filled["head"] = {**head, **filled["head"]} if "labels" not in filled["head"] else filled["head"]
    return filled


def check_vocabulary(model: Model, tokenizer: Tokenizer, objective: Objective) -> None:
    data = model.to_dict()
    for name in VOCAB_FIELDS.get(model.kind, ()):
        value: Any = data
        for key in name.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        require(
            value is None or value >= tokenizer.vocab_size,
            f"model.{name}={value} is smaller than the tokenizer's {tokenizer.vocab_size}; leave it out",
        )
    for name, value in objective.model_options(tokenizer).items():
        require(
            data[name] == value,
            f"model.{name}={data[name]}, but objective {objective.kind} and the tokenizer need {value}; set the same",
        )


def context_of(model: Any) -> int | None:
    """The largest number of tokens of a sequence that the model supports; None: any number."""
    if isinstance(model, Generative):
        return None
    parts = [getattr(model, name) for name in ("source", "target", "text", "decoder") if hasattr(model, name)]
    sequences = [part for part in parts or [model] if not (isinstance(part, Encoder) and part.input.length)]
    limits = [part.context or part.position.max_positions for part in sequences]
    return min((limit for limit in limits if limit is not None), default=None)
