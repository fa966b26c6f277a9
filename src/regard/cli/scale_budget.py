"""The token counts of a scaling study that take a given time to train, from the measured speed of every size."""

import math
import os
import statistics
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.training.scaling_grid import GridSize

MEASURED_STEPS = 10  # of each size; the first two are a warm-up


def counts_for_budget(
    tables: Any, sizes: "Sequence[GridSize]", power: float, minutes: float, seeds: int, jobs: int, device: str
) -> list[int]:
    """Token counts with which training takes this many minutes, from the speed of some steps of every size.

    jobs: runs at a time; those beyond the cores, or GPUs, wait for one another.
    """
    from regard.cli.sweep import stderr_note, visible_gpus
    from regard.compat import resolve_device
    from regard.training.scaling_grid import size_values, tokens_for_budget

    if not 0 < minutes < math.inf:
        raise ValueError("--budget must be a positive number of minutes")
    note, speeds, tokenizer = stderr_note(), [], None
    with threads_of_a_run(jobs):
        for size in sizes:
            seconds_per_token, tokenizer = measure_speed(tables, size_values(tables, size, power), tokenizer, device)
            speeds.append(seconds_per_token)
            note(f"{size}: {1 / seconds_per_token:,.0f} tokens/s")
    on_cpu = resolve_device(device) == "cpu"
    units = len(os.sched_getaffinity(0)) if on_cpu else max(1, len(visible_gpus()))
    counts = tokens_for_budget(60 * minutes, speeds, seeds, min(jobs, units))
    together = f" with {jobs} runs at a time" if jobs > 1 else ""
    note(f"token counts for {minutes:g} minutes{together}: {', '.join(f'{count:,}' for count in counts)}")
    return counts


@contextmanager
def threads_of_a_run(jobs: int) -> Generator[None]:
    """Compute with as many CPU threads as each of several runs at a time has."""
    import torch

    from regard.training.sweep import threads_of_job

    before = torch.get_num_threads()
    if jobs > 1:
        torch.set_num_threads(threads_of_job(len(os.sched_getaffinity(0)), jobs))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure_speed(tables: Any, values: dict[str, str], tokenizer: Any, device: str) -> tuple[float, Any]:
    """Seconds per token of a model with these values, and its tokenizer."""
    from regard.compat import resolve_device
    from regard.training.lr_finder import sweep_learning_rate
    from regard.training.overrides import override
    from regard.training.progress import Listener
    from regard.training.recipe import resolve
    from regard.training.run import Run
    from regard.training.start import build_model
    from regard.training_run import build_trainer

    resolved, tokenizer, splits = resolve(override(tables, values), tokenizer)
    model = build_model(resolved).to(resolve_device(device))
    times = [time.perf_counter()]
    with TemporaryDirectory() as folder:  # the directory of no run
        trainer = build_trainer(Run(folder), resolved, model, tokenizer, splits._replace(held_out=None), Listener())
        sweep_learning_rate(
            trainer.model, trainer.loader, trainer.objective, trainer.settings, 1e-6, 1e-5, MEASURED_STEPS,
            lambda *_: times.append(time.perf_counter()),
        )  # fmt: skip
    steps = [after - before for before, after in zip(times[2:], times[3:], strict=False)]
    return statistics.median(steps) / (resolved.data.rows * resolved.data.length), tokenizer
