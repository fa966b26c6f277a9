"""Interleaved timing: every candidate runs once per round, so that the machine's load affects all equally."""

import statistics
import sys
import time
from collections.abc import Callable


def interleave(candidates: dict[str, Callable[[], object]], rounds: int, amount: int) -> dict[str, float]:
    """Median of `amount` (tokens) per second of each candidate; the first round is a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for round_number in range(rounds + 1):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            if round_number:
                seconds[name].append(time.perf_counter() - start)
        print(f"  round {round_number} of {rounds}", file=sys.stderr)
    return {name: round(amount / statistics.median(times), 1) for name, times in seconds.items()}
