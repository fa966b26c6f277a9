"""Feature maps φ of linear attention: what stands for exp(q·k) is φ(q)·φ(k).

elu         φ(x) = elu(x) + 1         positive, so weights are too            Katharopoulos et al. 2020
performer   φ(x) = exp(w·x - |x|²/2)  for random w: softmax in the mean        Choromanski et al. 2020
identity    φ(x) = x                  scores of any sign: not to be normalized
"""

from dataclasses import dataclass

from regard.spec import Spec, require


@dataclass(frozen=True)
class FeatureMap(Spec):
    def size(self, head_dim: int) -> int:
        """How many features a head has."""
        return head_dim

    def check_use(self, normalize: bool) -> None:
        """Raise SpecError where they must not, or must, be normalized."""


@dataclass(frozen=True)
class EluFeatures(FeatureMap):
    pass


@dataclass(frozen=True)
class IdentityFeatures(FeatureMap):
    def check_use(self, normalize: bool) -> None:
        require(
            not normalize,
            "identity: its scores may be negative and sum to zero, and nothing can be divided by that; "
            "set normalize=False, or choose elu or performer",
        )


@dataclass(frozen=True)
class PerformerFeatures(FeatureMap):
    count: int | None = None  # random directions; None: as a head is wide

    def check(self) -> None:
        require(self.count is None or self.count > 0, f"performer: count={self.count} must be positive")

    def size(self, head_dim: int) -> int:
        return self.count or head_dim

    def check_use(self, normalize: bool) -> None:
        require(normalize, "performer: it stands for softmax, whose weights sum to 1; leave normalize=False out")
