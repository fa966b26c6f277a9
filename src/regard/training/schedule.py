"""Learning-rate schedules: a factor on the peak rate, a pure function of how many of the steps have been taken.

    warm-up             f(k) = (k + 1) / w                                     for k < w, then
    Constant            f(k) = 1
    Cosine              f(k) = m + (1 - m) (1 + cos πp) / 2,  p = (k - w) / (n - w)           Loshchilov & Hutter 2017
    WarmupStableDecay   f(k) = 1, and in the last d steps m + (1 - m) (1 - √p),  p = (k - n + d) / d      Hu et al. 2024

k steps of n are behind, w is the warm-up, m the floor. WSD's stable part can be prolonged at will, since only the decay
depends on the end; its form 1 - √p is the best of those that Hägele et al. 2024 compared.
"""

import math
from dataclasses import dataclass

from regard.spec import Spec, require


@dataclass(frozen=True)
class Schedule(Spec):
    warmup: int = 0  # steps

    def check(self) -> None:
        require(self.warmup >= 0, f"{self.kind}: warmup={self.warmup} must not be negative")

    def factor(self, done: int, steps: int) -> float:
        """What to multiply the peak rate with when `done` of the `steps` have been taken."""
        return (done + 1) / self.warmup if done < self.warmup else self.after_warmup(done, steps)

    def after_warmup(self, done: int, steps: int) -> float:
        raise NotImplementedError


@dataclass(frozen=True)
class Constant(Schedule):
    def after_warmup(self, done: int, steps: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Cosine(Schedule):
    floor: float = 0.1

    def check(self) -> None:
        super().check()
        require(0 <= self.floor <= 1, f"cosine: floor={self.floor} must be in [0, 1]")

    def after_warmup(self, done: int, steps: int) -> float:
        progress = (done - self.warmup) / (steps - self.warmup)
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * progress)) / 2


@dataclass(frozen=True)
class WarmupStableDecay(Schedule):
    decay: float = 0.2  # share of all steps
    floor: float = 0.0

    def check(self) -> None:
        super().check()
        require(0 < self.decay <= 1, f"wsd: decay={self.decay} is a share of all steps and must be in (0, 1]")
        require(0 <= self.floor <= 1, f"wsd: floor={self.floor} must be in [0, 1]")

    def after_warmup(self, done: int, steps: int) -> float:
        decay = math.ceil(self.decay * steps)
        progress = max(0.0, (done - steps + decay) / decay)
        return self.floor + (1 - self.floor) * (1 - math.sqrt(progress))
