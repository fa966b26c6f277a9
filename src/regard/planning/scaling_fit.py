"""The fit of a scaling law to measured losses (Hoffmann et al. 2022, approach 3), with bootstrap intervals.

    minimise  Σ Huber_δ(log L̂(N, D) - log L),   δ = 10⁻³
    log L̂ = logsumexp(e, a - α log(N / N₀), b - β log(D / D₀))        E = exp e, A = N₀^α exp a, B = D₀^β exp b

N₀ and D₀ are the geometric means, so that the constants are not correlated with the exponents. The minimum is found in
float64 from several exponents; for given exponents the law is linear in E, A and B, which gives their start. All
starts, and all draws, are minimised at once by damped Gauss-Newton steps (Levenberg-Marquardt) with the weights of the
Huber loss. L-BFGS, which the paper uses, ends at the same minima but takes them one by one.

Intervals: the residuals are drawn with replacement, added to the fitted losses, and the law is fitted again. The grid
of runs stays as it is. The residuals are enlarged by √(R / (R - 5)), because the fit made them smaller.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product

import torch
from torch import Tensor

from regard.planning.scaling import ScalingLaw, ScalingRun

DELTA = 1e-3  # of the Huber loss, in relative units of the loss: larger residuals count linearly
CONSTANTS = 5
START_EXPONENTS = (0.1, 0.3, 0.6, 1.0)
STEPS = 300
LARGEST_STEP = 1.0  # of a logarithm or an exponent
EXPONENTS = (0.02, 8.0)  # outside, the term is a constant, or zero but for the smallest value
COVERED = 0.9  # of the draws lie in an interval
LEAST_LAWS = 0.9  # of the draws; if more of them have no law, the runs determine no interval
FittedInterval = tuple[float, float]


@dataclass(frozen=True)
class ScalingFit:
    """A law, the relative residuals of its runs, and the laws of the bootstrap draws."""

    law: ScalingLaw
    runs: tuple[ScalingRun, ...]
    residuals: tuple[float, ...]  # log L - log L̂
    draws: tuple[ScalingLaw, ...] = ()
    wanted: int = 0  # draws; some have no law

    @property
    def error(self) -> float:
        """The relative residual, as a root of the mean square."""
        return math.sqrt(math.fsum(residual**2 for residual in self.residuals) / len(self.residuals))

    def redraw(self, generator: torch.Generator) -> list[ScalingRun]:
        """The runs with the losses of the law and random residuals, as in a bootstrap draw."""
        chosen = torch.randint(len(self.runs), (len(self.runs),), generator=generator).tolist()
        enlarged = [enlargement(len(self.runs)) * self.residuals[i] for i in chosen]
        return [
            replace(run, loss=run.loss * math.exp(new - own))
            for run, own, new in zip(self.runs, self.residuals, enlarged, strict=True)
        ]

    def interval(self, value: Callable[[ScalingLaw], float]) -> FittedInterval | None:
        """The interval of a number that follows from the law; None if too few draws have a law."""
        return interval([value(law) for law in self.draws]) if len(self.draws) >= LEAST_LAWS * self.wanted else None


def enlargement(runs: int) -> float:
    """Of residuals, which the fit made smaller."""
    return math.sqrt(runs / (runs - CONSTANTS))


def interval(values: Sequence[float]) -> FittedInterval | None:
    """The middle 90 % of the values; None if there are none."""
    if not values:
        return None
    outside = (1 - COVERED) / 2
    low, high = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([outside, 1 - outside]).double())
    return low.item(), high.item()


def fit_law(
    runs: Sequence[ScalingRun],
    draws: int = 0,
    seed: int = 0,
) -> ScalingFit:
    """The law of these runs. draws: the number of bootstrap draws for the intervals."""
    check_runs(runs)
    n, d, loss = (
        torch.tensor([getattr(run, name) for run in runs], dtype=torch.float64).log()
        for name in ("parameters", "tokens", "loss")
    )  # (R,)
    centers = n.mean(), d.mean()
    n, d = n - centers[0], d - centers[1]
    found, objectives = minimise(n, d, loss.unsqueeze(0), starts(n, d, loss))
    theta = found[objectives.argmin()]
    for name, exponent in zip(("size", "number of tokens"), theta[3:].tolist(), strict=True):
        if not EXPONENTS[0] < exponent < EXPONENTS[1]:
            raise ValueError(
                f"the loss does not fall with the {name} like a power (exponent {exponent:.3g}), so there is no law to "
                "fit; train more sizes and token counts in a wider range, and check that every run converged"
            )
    fitted = terms(theta, n, d).logsumexp(-1)
    residuals = loss - fitted
    enlarged = residuals * enlargement(len(runs))
    chosen = torch.randint(len(runs), (draws, len(runs)), generator=torch.Generator().manual_seed(seed))
    again, _ = minimise(n, d, fitted + enlarged[chosen], theta.expand(draws, -1))  # (draws, 5)
    laws = [law_of(row, *centers) for row in again if all(EXPONENTS[0] < e < EXPONENTS[1] for e in row[3:].tolist())]
    return ScalingFit(law_of(theta, *centers), tuple(runs), tuple(residuals.tolist()), tuple(laws), draws)


def check_runs(runs: Sequence[ScalingRun]) -> None:
    """Raise ValueError if the runs cannot determine a law."""
    for number, run in enumerate(runs, 1):
        for name, value in asdict(run).items():
            if not (math.isfinite(value) and value > 0):
                raise ValueError(
                    f"run {number} has {name}={value}, and a law is fitted to positive numbers; leave out the runs "
                    "that diverged"
                )
    if len(runs) <= CONSTANTS:
        raise ValueError(f"{len(runs)} runs cannot determine the five constants of the law; train at least six")
    for name, values in (("sizes", {run.parameters for run in runs}), ("token counts", {run.tokens for run in runs})):
        if len(values) < 3:
            raise ValueError(
                f"the runs have {len(values)} of the at least three {name} that determine an exponent; add more {name}"
            )
    low, high = min(run.loss for run in runs), max(run.loss for run in runs)
    if high < low * (1 + 1e-9):
        raise ValueError(f"all losses are {low:.6g}: they depend on neither size nor tokens, and no law can be fitted")


def terms(theta: Tensor, n: Tensor, d: Tensor) -> Tensor:
    """The logarithms of the law's three terms for centred logarithms of sizes and tokens (R,): (…, R, 3)."""
    e, a, b, alpha, beta = theta.unsqueeze(-1).unbind(-2)  # (…, 1)
    return torch.stack([e.expand(*e.shape[:-1], len(n)), a - alpha * n, b - beta * d], -1)


def starts(n: Tensor, d: Tensor, loss: Tensor) -> Tensor:
    """The constants of least squared relative error for pairs of exponents (G, 5)."""
    found = []
    for alpha, beta in product(START_EXPONENTS, START_EXPONENTS):
        powers = torch.stack([torch.ones_like(n), (-alpha * n).exp(), (-beta * d).exp()], -1)  # (R, 3)
        relative = powers / loss.exp().unsqueeze(-1)
        constants = torch.linalg.lstsq(relative, torch.ones_like(n).unsqueeze(-1)).solution.squeeze(-1)
        constants = constants.clamp_min(1e-3 * loss.exp().min().item())  # a negative constant has no logarithm
        found.append(torch.cat([constants.log(), constants.new_tensor([alpha, beta])]))
    return torch.stack(found)


def minimise(n: Tensor, d: Tensor, loss: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
    """The constants (G, 5) of the least sums of Huber losses from these starts, and the sums in units of δ² (G,).

    loss: (1, R), or (G, R) with other losses for every start.
    """
    theta, damping = theta.clone(), torch.full((len(theta), 1), 1e-2, dtype=theta.dtype)
    objective, residuals, slopes = evaluate(n, d, loss, theta)
    for _ in range(STEPS):
        weights = residuals.abs().clamp_min(1).reciprocal().unsqueeze(-1)  # (G, R, 1)
        curvature = slopes.mT @ (weights * slopes)  # (G, 5, 5)
        gradient = slopes.mT @ (weights * residuals.unsqueeze(-1))  # (G, 5, 1)
        diagonal = curvature.diagonal(dim1=-2, dim2=-1)
        added = damping * diagonal + 1e-12 * diagonal.amax(-1, keepdim=True) + 1e-300
        step = torch.linalg.solve(curvature + added.diag_embed(), gradient).squeeze(-1)
        tried = theta - step.clamp(-LARGEST_STEP, LARGEST_STEP)
        better_objective, new_residuals, new_slopes = evaluate(n, d, loss, tried)
        better = better_objective < objective  # (G,)
        theta = torch.where(better[:, None], tried, theta)
        residuals = torch.where(better[:, None], new_residuals, residuals)
        slopes = torch.where(better[:, None, None], new_slopes, slopes)
        objective = torch.where(better, better_objective, objective)
        damping = torch.where(better[:, None], damping / 4, damping * 3).clamp(1e-12, 1e12)
    return theta, objective


def evaluate(n: Tensor, d: Tensor, loss: Tensor, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The sums of Huber losses (G,), residuals (G, R) and their slopes by the constants (G, R, 5), in units of δ."""
    logs = terms(theta, n, d)  # (G, R, 3)
    residuals = (logs.logsumexp(-1) - loss) / DELTA
    size = residuals.abs()
    objective = torch.where(size < 1, residuals.square() / 2, size - 0.5).sum(-1)
    floor, by_size, by_data = logs.softmax(-1).unbind(-1)
    slopes = torch.stack([floor, by_size, by_data, -n * by_size, -d * by_data], -1) / DELTA
    return objective.nan_to_num(torch.inf), residuals, slopes


def law_of(theta: Tensor, center_n: Tensor, center_d: Tensor) -> ScalingLaw:
    e, a, b, alpha, beta = theta
    constants = e.exp(), (a + alpha * center_n).exp(), alpha, (b + beta * center_d).exp(), beta
    return ScalingLaw(*(constant.item() for constant in constants))
