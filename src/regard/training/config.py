"""Training: the settings of a run, the same in Python, JSON and TOML.

What the model is and which data it reads is said elsewhere (recipe.py). A batch of the loader is one step.
"""

from dataclasses import dataclass
from typing import Literal

from regard.models.initialize import Scheme
from regard.spec import Spec, require
from regard.training.optimizer import AdamW
from regard.training.schedule import Cosine, Schedule


@dataclass(frozen=True)
class Training(Spec):
    steps: int
    lr: float = 1e-3  # the schedule's peak
    seed: int = 0
    initialize: Scheme = "fan_in"  # how fresh weights are drawn (models/initialize.py)
    schedule: Schedule = Cosine(warmup=100)
    optimizer: AdamW = AdamW()
    accumulate: int = 1  # parts into which a step's batch is cut to save memory; the loss does not change
    clip: float = 1.0  # largest norm of the gradient; 0: not clipped
    precision: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 autocast on CUDA, else float32
    compile: bool = False
    nonfinite: Literal["stop", "skip"] = "stop"  # what to do about a loss or gradient that is no number
    evaluate_every: int = 250  # steps; 0: at the end only
    save_every: int = 250  # steps; 0: at the end only
    keep: int = 2  # checkpoints; from two on, a damaged one has a predecessor to fall back to

    def check(self) -> None:
        for name in ("steps", "accumulate", "keep"):
            require(getattr(self, name) >= 1, f"training: {name}={getattr(self, name)} must be at least 1")
        for name in ("clip", "evaluate_every", "save_every"):
            require(getattr(self, name) >= 0, f"training: {name}={getattr(self, name)} must not be negative")
        require(self.lr > 0, f"training: lr={self.lr} must be positive")
