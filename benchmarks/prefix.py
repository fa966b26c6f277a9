"""Time to the first token of a prompt of 544 tokens, with and without a cached prefix of 512; the model of decode.py.

python -m benchmarks.prefix
"""

import json
from itertools import count
from time import perf_counter

import torch

from benchmarks.decode import CONFIG
from regard.engine.engine import Engine
from regard.engine.request import Sampling
from regard.families import llama

PREFIX, SUFFIX = 512, 32


def random_ids(length: int, seed: int) -> list[int]:
    return torch.randint(CONFIG.vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def time_to_first_token(engine: Engine, ids: list[int]) -> float:
    start = perf_counter()
    engine.generate(ids, Sampling(max_new=1, temperature=0))
    return perf_counter() - start


def measure(rounds: int = 7) -> dict[str, float]:
    """Medians in seconds; the two kinds of prompts alternate."""
    engine = Engine(llama.spec(CONFIG.to_dict()).build(seed=0), rows=1, capacity=1024)
    shared, seeds = random_ids(PREFIX, 0), count(1)
    times: dict[str, list[float]] = {"miss": [], "hit": []}
    time_to_first_token(engine, shared + random_ids(SUFFIX, next(seeds)))
    for _ in range(rounds):
        times["miss"].append(time_to_first_token(engine, random_ids(PREFIX + SUFFIX, next(seeds))))
        times["hit"].append(time_to_first_token(engine, shared + random_ids(SUFFIX, next(seeds))))
    assert engine.metrics()["prefix_hit_tokens"] == rounds * PREFIX
    miss, hit = (torch.tensor(times[kind]).median().item() for kind in ("miss", "hit"))
    return {"miss": miss, "hit": hit, "ratio": miss / hit}


if __name__ == "__main__":
    print(json.dumps(measure()))
