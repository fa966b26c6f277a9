"""Steps that must not be taken: a loss or gradient that is not finite, and a loss that spikes.

A fault is detected after the backward pass and before any weight changes. The policy (`train.nonfinite`) is one of

    stop        save the unchanged state, raise the fault
    skip        continue with the next batch
    roll_back   restore the last scheduled checkpoint and continue with the next batch, so that the batches since that
                checkpoint are not used again (as for PaLM, Chowdhery et al. 2022)

A spike is a loss above `train.spike` times the median of the last losses. These losses are part of a checkpoint, so
that a resumed run detects the same spikes.
"""

from collections import deque
from statistics import median
from typing import Any

WINDOW = 64  # losses
MIN_LOSSES = 8  # before that many, no loss is a spike
MAX_ROLL_BACKS = 3  # to the same checkpoint


class StepFault(ValueError):
    """A step that must not be taken; weights and moments are unchanged."""


class NonFinite(StepFault):
    """A loss or gradient that is not finite."""


class LossSpike(StepFault):
    """A loss far above its running median."""


class FaultState:
    """The recent losses, and how often the last scheduled checkpoint was rolled back to."""

    def __init__(self, factor: float):
        self.factor, self.roll_backs = factor, 0
        self.losses: deque[float] = deque(maxlen=WINDOW)

    def check(self, loss: float) -> None:
        """Raise LossSpike if the loss is a spike."""
        if self.factor and len(self.losses) >= MIN_LOSSES and loss > self.factor * median(self.losses):
            raise LossSpike(
                f"the loss {loss:.4g} is above {self.factor:g} times the median {median(self.losses):.4g} of the last "
                f"{len(self.losses)} losses"
            )

    def add(self, loss: float) -> None:
        if self.factor:
            self.losses.append(loss)

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses), "roll_backs": self.roll_backs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = deque(state["losses"], maxlen=WINDOW)
        self.roll_backs = state["roll_backs"]
