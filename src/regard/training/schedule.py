"""Learning-rate schedules: a factor of the peak rate, as a function of the number of steps taken.

    warm-up             f(k) = (k + 1) / w                                     for k < w, then
    Constant            f(k) = 1
    LinearDecay         f(k) = m + (1 - m) (1 - p),  p = (k - w) / (n - w)
    Cosine              f(k) = m + (1 - m) (1 + cos πp) / 2,  p = (k - w) / (n - w)           Loshchilov & Hutter 2017
    InverseSqrt         f(k) = √(w / (k + 1))                                                 Vaswani et al. 2017
    WarmupStableDecay   f(k) = 1, and in the last d steps m + (1 - m) (1 - √p),  p = (k - n + d) / d      Hu et al. 2024

k of n steps have been taken, w is the warm-up, m the floor. The stable part of WarmupStableDecay can be extended, since
only the decay depends on n; so can InverseSqrt, which does not depend on n. Hägele et al. 2024 compared several forms
of the decay and found 1 - √p to be the best.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from regard.spec import Spec, require


@dataclass(frozen=True)
class Schedule(Spec):
    kind_table: ClassVar[str] = "schedules"

    warmup: int = 0  # steps

    def check(self) -> None:
        require(self.warmup >= 0, f"{self.kind}: warmup={self.warmup} must not be negative")
        floor = getattr(self, "floor", 0.0)
        require(0 <= floor <= 1, f"{self.kind}: floor={floor} must be in [0, 1]")

    def factor(self, done: int, steps: int) -> float:
        """The factor of the peak rate after `done` of `steps` steps."""
        return (done + 1) / self.warmup if done < self.warmup else self.after_warmup(done, steps)

    def after_warmup(self, done: int, steps: int) -> float:
        raise NotImplementedError


@dataclass(frozen=True)
class Constant(Schedule):
    """f(k) = 1 after the warm-up."""

    def after_warmup(self, done: int, steps: int) -> float:
        return 1.0


@dataclass(frozen=True)
class LinearDecay(Schedule):
    """f(k) = m + (1 - m) (1 - p) after the warm-up, with p = (k - w) / (n - w) and the floor m."""

    floor: float = 0.0

    def after_warmup(self, done: int, steps: int) -> float:
        return self.floor + (1 - self.floor) * (steps - done) / (steps - self.warmup)


@dataclass(frozen=True)
class Cosine(Schedule):
    """f(k) = m + (1 - m) (1 + cos πp) / 2 after the warm-up, with p = (k - w) / (n - w) and the floor m."""

    floor: float = 0.1

    def after_warmup(self, done: int, steps: int) -> float:
        progress = (done - self.warmup) / (steps - self.warmup)
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * progress)) / 2


@dataclass(frozen=True)
class InverseSqrt(Schedule):
    """f(k) = √(w / (k + 1)) after a warm-up of w steps, in which it is (k + 1) / w.

    lr · f(k) is the rate of Vaswani et al. 2017, width^-½ · min(t^-½, t · w^-3/2) with t = k + 1, for
    lr = (width · w)^-½.
    """

    def after_warmup(self, done: int, steps: int) -> float:
        return math.sqrt(max(self.warmup, 1) / (done + 1))


@dataclass(frozen=True)
class WarmupStableDecay(Schedule):
    """f(k) = 1 after the warm-up; in the last d steps m + (1 - m) (1 - √p), p = (k - n + d) / d, with the floor m."""

    decay: float = 0.2  # fraction of all steps
    floor: float = 0.0

    def check(self) -> None:
        super().check()
        require(0 < self.decay <= 1, f"wsd: decay={self.decay} is a fraction of all steps and must be in (0, 1]")

    def after_warmup(self, done: int, steps: int) -> float:
        decay = math.ceil(self.decay * steps)
        progress = max(0.0, (done - steps + decay) / decay)
        return self.floor + (1 - self.floor) * (1 - math.sqrt(progress))
