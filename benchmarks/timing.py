"""Interleaved timing: every contender takes its turn in every round, so that a noisy machine is noisy to all alike."""

import statistics
import sys
import time
from collections.abc import Callable


def interleave(contenders: dict[str, Callable[[], object]], rounds: int, amount: int) -> dict[str, float]:
    """Median amounts (tokens) per second of each; one untimed round first."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, work in contenders.items():
            start = time.perf_counter()
            work()
            if turn:
                seconds[name].append(time.perf_counter() - start)
        print(f"  round {turn} of {rounds}", file=sys.stderr)
    return {name: round(amount / statistics.median(times), 1) for name, times in seconds.items()}
