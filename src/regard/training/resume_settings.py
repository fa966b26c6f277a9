"""Overrides on resume: which settings of a run can be changed, and when the learning rate would jump.

Only settings that leave the saved state valid can be changed. More steps stretch a schedule that depends on their
number (Cosine, the decay of WarmupStableDecay): the learning rate jumps up, so such an extension needs a flag.
"""

from collections.abc import Callable, Mapping
from typing import Any

from regard.spec import require
from regard.training.overrides import parse_value
from regard.training.recipe import Training
from regard.training.run import Run
from regard.training.run_identity import read_changes

CHANGEABLE = tuple(
    f"train.{name}"
    for name in (
        "steps", "lr", "clip", "nonfinite", "spike", "save_every", "evaluate_every", "keep", "accumulate", "compile",
        "precision", "checkpoint_activations", "async_save", "monitor_every",
    )
)  # fmt: skip
MAX_JUMP = 1.1  # the largest factor between the rates of two successive steps that is not reported as a jump


def parse_changes(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The values of overrides that a run can be resumed with; others raise SpecError."""
    for name in overrides:
        require(
            name in CHANGEABLE,
            f"{name} cannot be changed when a run is resumed, only {', '.join(CHANGEABLE)}; start a new run",
        )
    return {name: parse_value(value) for name, value in overrides.items()}


def apply_overrides(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    values = {name.removeprefix("train."): value for name, value in overrides.items()}
    return {**config, "train": {**config["train"], **values}}


def check_extension(before: Training, after: Training, step: int, extend: bool) -> str | None:
    """A note about the learning rate if `after` has more steps and a rate that jumps; without `extend` an error."""
    if after.steps <= before.steps or step < after.schedule.warmup:
        return None
    last = before.schedule.factor(min(step, before.steps - 1), before.steps)
    following = after.schedule.factor(step, after.steps)
    if following <= MAX_JUMP * last:
        return None
    rates = f"from {last * before.lr:.3g} to {following * after.lr:.3g} at step {step + 1}"
    require(
        extend,
        f"train.steps={after.steps} extends a run of {before.steps} steps, and the learning rate would jump {rates}, "
        "because the schedule depends on the number of steps; accept the jump with --extend (in Python extend=True)",
    )
    return (
        f"the run is extended to {after.steps} steps; the schedule is that of {after.steps} steps, so the "
        f"learning rate jumps {rates}"
    )


def resumed_config(
    run: Run, overrides: Mapping[str, Any], extend: bool, note: Callable[[str], None]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config of a run with all its changes, and the overrides that change it once more."""
    config = run.config
    for change in read_changes(run.path):
        config = apply_overrides(config, change["overrides"])
    before, values = Training.from_dict(config["train"]), parse_changes(overrides)
    changed = apply_overrides(config, values)
    after = Training.from_dict(changed["train"])
    message = check_extension(before, after, run.step, extend)
    if message is not None:
        note(message)
    new = {name: value for name, value in values.items() if setting(before, name) != setting(after, name)}
    return changed, new


def setting(settings: Training, name: str) -> Any:
    return getattr(settings, name.removeprefix("train."))
