"""One sequence without end in constant memory: `python -m benchmarks.endless [--tokens 100000] [--cache sinks:4+16]`.

The small model of the instruments, whose context is 24 tokens, generates through a cache of 20, at temperature 1.
For every tenth of the tokens: the perplexity that the model gives its own tokens, the bytes of the cache, the memory
of the process, and processor time per token. The command fails if a log-probability is not finite or the cache grows.
"""

import argparse
import math
import resource
import time

from regard.engine.engine import Engine
from regard.engine.request import Sampling
from regard.instruments.examples import example_subject


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--cache", default="sinks:4+16")
    parser.add_argument("--compile", action="store_true", help="compile decode steps, which takes a minute")
    options = parser.parse_args()
    engine = Engine(example_subject().model, rows=1, cache=options.cache, compile=options.compile)
    request = engine.submit([0], Sampling(max_new=options.tokens, temperature=1.0, seed=0))
    size, part = engine.metrics()["cache_bytes"], options.tokens // 10
    start, done = time.process_time(), 0
    while request.finish is None:
        engine.step()
        if len(request.new) - done == part:
            losses = [-token.logprob for token in request.new[done:]]
            assert all(map(math.isfinite, losses)), "a log-probability is not finite"
            assert engine.metrics()["cache_bytes"] == size, "the cache has grown"
            spent, start, done = time.process_time() - start, time.process_time(), len(request.new)
            print(
                f"{done:,} tokens: perplexity {math.exp(sum(losses) / part):.3f}, cache {size:,} bytes, at most "
                f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB, {spent / part * 1e6:.0f} µs",
                flush=True,
            )
    print(f"ended: {request.finish}")


if __name__ == "__main__":
    main()
