"""The fit of a scaling law: planted constants are recovered, intervals contain them, degenerate grids are refused."""

import dataclasses
import math
from collections.abc import Sequence

import pytest
import torch

from regard.planning.isoflop import isoflops
from regard.planning.scaling import BESIROGLU, HOFFMANN, ScalingLaw, ScalingRun, flops_6nd
from regard.planning.scaling_fit import fit_law
from regard.planning.scaling_study import read_runs, study

SIZES, DATA = [1e6, 3e6, 1e7, 3e7, 1e8, 1e9], [1e7, 1e8, 1e9, 1e10, 1e11]
SMALL = ScalingLaw(0.6, 40.0, 0.45, 300.0, 0.5)  # as of models that train in minutes
SMALL_SIZES, SMALL_DATA = [5e3 * 2.2**k for k in range(6)], [1e5 * 2**k for k in range(5)]
GRIDS = {
    "hoffmann": (HOFFMANN, SIZES, DATA),
    "besiroglu": (BESIROGLU, SIZES, DATA),
    "small": (SMALL, SMALL_SIZES, SMALL_DATA),
}


def planted(
    law: ScalingLaw, sizes: Sequence[float], data: Sequence[float], noise: float = 0.0, seed: int = 0
) -> list[ScalingRun]:
    """Runs with the losses of a law, with a relative error."""
    generator = torch.Generator().manual_seed(seed)
    runs = []
    for n in sizes:
        for d in data:
            error = noise * torch.randn((), generator=generator, dtype=torch.float64).item()
            runs.append(ScalingRun(n, d, law.loss(n, d) * math.exp(error), flops_6nd(n, d)))
    return runs


@pytest.mark.ledger("calc.scaling")
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("seed", range(4))
def test_planted_constants_are_recovered_within_5_percent(grid: str, seed: int) -> None:
    law, sizes, data = GRIDS[grid]
    found = fit_law(planted(law, sizes, data, 0.002, seed)).law
    for name in ("size_exponent", "data_exponent", "optimum_exponent", "floor"):
        assert getattr(found, name) == pytest.approx(getattr(law, name), rel=0.05), name


@pytest.mark.ledger("calc.scaling")
@pytest.mark.parametrize("grid", GRIDS)
def test_exact_losses_give_the_exact_law(grid: str) -> None:
    law, sizes, data = GRIDS[grid]
    found = fit_law(planted(law, sizes, data))
    for name, known in dataclasses.asdict(law).items():
        assert getattr(found.law, name) == pytest.approx(known, rel=1e-3), name
    assert found.error < 1e-6


def test_a_run_that_failed_hardly_moves_the_law() -> None:
    runs = planted(BESIROGLU, SIZES, DATA, 0.001)
    runs[7] = dataclasses.replace(runs[7], loss=1.5 * runs[7].loss)
    assert fit_law(runs).law.size_exponent == pytest.approx(BESIROGLU.size_exponent, rel=0.05)


def test_intervals_contain_the_planted_exponents() -> None:
    """An interval of 90 % misses each number with one of ten seeds."""
    contained = 0
    for seed in range(10):
        found = fit_law(planted(SMALL, SMALL_SIZES, SMALL_DATA, 0.003, seed), draws=40, seed=seed)
        for name in ("size_exponent", "data_exponent", "optimum_exponent"):
            spread = found.interval(lambda law, name=name: getattr(law, name))
            assert spread is not None and spread[0] < getattr(found.law, name) < spread[1]
            contained += spread[0] <= getattr(SMALL, name) <= spread[1]
    assert 22 <= contained <= 30  # 27 of 30 expected


@pytest.mark.parametrize("seed", range(3))
def test_isoflop_curves_find_the_planted_optimum_without_the_law(seed: int) -> None:
    sizes, data = [1e7 * 2**k for k in range(9)], [2e8 * 2**k for k in range(9)]
    runs = planted(BESIROGLU, sizes, data, 0.001, seed)
    found = isoflops(runs, fit_law(runs), draws=20)
    assert found.size_exponent == pytest.approx(BESIROGLU.optimum_exponent, rel=0.05)
    assert found.token_exponent == pytest.approx(1 - BESIROGLU.optimum_exponent, rel=0.05)
    assert found.size_interval is not None and found.size_interval[0] < found.size_exponent + 0.02
    for curve in found.curves:
        assert curve.size is not None and curve.tokens is not None
        best = BESIROGLU.optimum(curve.compute)
        assert curve.size == pytest.approx(best[0], rel=0.25) and curve.tokens == pytest.approx(best[1], rel=0.25)


def test_a_minimum_at_the_end_of_a_curve_is_no_vertex() -> None:
    runs = planted(SMALL, [5e6, 1e7, 2e7], SMALL_DATA)  # all larger than the optimum
    found = isoflops(runs)
    assert found.curves and all(curve.size is None for curve in found.curves) and found.size_exponent is None


def test_flops_that_do_not_grow_with_the_tokens_are_refused() -> None:
    runs = [dataclasses.replace(run, flops=1e20) for run in planted(BESIROGLU, SIZES, DATA)]
    with pytest.raises(ValueError, match=r"1e\+08 tokens with 1e\+06 parameters have flops=1e\+20, no more than fewer"):
        study(runs, draws=0)


def degenerate(kind: str) -> list[ScalingRun]:
    runs = planted(BESIROGLU, SIZES, DATA)
    return {
        "one size": [run for run in runs if run.parameters == SIZES[0]] * 2,
        "two token counts": [run for run in runs if run.tokens in DATA[:2]],
        "few": runs[:5],
        "equal": [dataclasses.replace(run, loss=2.0) for run in runs],
        "nan": [*runs, dataclasses.replace(runs[0], loss=math.nan)],
        "rising": [dataclasses.replace(run, loss=2 + math.log(run.parameters) / 10 + 9 / run.tokens) for run in runs],
    }[kind]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("one size", "1 of the at least three sizes"),
        ("two token counts", "2 of the at least three token counts"),
        ("few", "5 runs cannot determine the five constants.*at least six"),
        ("equal", "all losses are 2"),
        ("nan", "run 31 has loss=nan.*leave out the runs that diverged"),
        ("rising", "does not fall with the size"),
    ],
)
def test_degenerate_grids_are_refused(kind: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_law(degenerate(kind))


def test_a_study_recommends_the_optimum_with_intervals() -> None:
    runs = planted(BESIROGLU, SIZES, DATA, 0.002)
    found = study(runs, [1e20], draws=20)
    best, (parameters, tokens) = found.optimum(1e20), BESIROGLU.optimum(1e20)
    assert best["parameters"]["value"] == pytest.approx(parameters, rel=0.15)
    assert best["tokens"]["value"] == pytest.approx(tokens, rel=0.15)
    low, high = best["parameters"]["interval"]
    assert low < best["parameters"]["value"] < high
    largest = flops_6nd(SIZES[-1], DATA[-1])
    assert study(runs, draws=0).budgets == (largest, 10 * largest, 100 * largest)


def test_results_are_read_from_json_and_csv(tmp_path) -> None:
    (tmp_path / "a.json").write_text('{"runs": [{"parameters": 10, "tokens": 20, "loss": 3}]}')
    (tmp_path / "a.csv").write_text("parameters,tokens,loss,flops\n10,20,3,7\n1e3,2e3,2.5,\n")
    assert read_runs(tmp_path / "a.json") == [ScalingRun(10, 20, 3, 1200)]
    assert read_runs(tmp_path / "a.csv") == [ScalingRun(10, 20, 3, 7), ScalingRun(1e3, 2e3, 2.5, 1.2e7)]
    for text, message in (
        ("[]", "has no runs"), ("{", "is not JSON"), ('[{"tokens": 1}]', "run 1 has no parameters"),
        ("[" * 100_000, "is not JSON"),
        ('[{"parameters": 1, "tokens": 1, "loss": true}]', "loss=True, flops=None; they must be finite numbers"),
        (f'[{{"parameters": 1, "tokens": 1, "loss": {"9" * 400}}}]', "they must be finite numbers"),
        ('[{"parameters": "x", "tokens": 1, "loss": 1}]', "must be finite numbers"),
    ):  # fmt: skip
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            read_runs(tmp_path / "bad.json")
