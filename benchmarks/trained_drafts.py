"""Trained drafters beside plain decoding: CPU time per token of greedy output, one request at a time.

    regard demo
    regard speculate train runs/demo drafts/medusa --heads 6 --data.source=world --train.steps=800 --train.lr=2e-3
    regard speculate train runs/demo drafts/eagle --method eagle --data.source=world --train.steps=800 --train.lr=2e-3
    python -m benchmarks.trained_drafts runs/demo medusa:drafts/medusa eagle:drafts/eagle self:1 ngram

The prompts are the beginnings of held-out stories. Drafts have their full length, whatever their expected gain. The
methods run in turn, and a difference in any token is an error.
"""

import argparse
import itertools
import statistics
import time
from pathlib import Path

import torch

import regard
from regard.cli.speculation_options import open_drafter
from regard.draft_training import prompts_of
from regard.engine.engine import Engine
from regard.engine.request import Sampling
from regard.engine.speculation.draft_length import DraftCosts
from regard.objectives.next_token import NextToken
from regard.training.data_settings import Data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("methods", nargs="+", help="as for --speculate")
    parser.add_argument("--draft-tokens", type=int, default=2)
    parser.add_argument("--draft-chains", type=int, nargs="+", default=[1], help="candidates, of trained drafters")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--max-new", type=int, default=40)
    parser.add_argument("--runs", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    llm, stories = regard.load(options.model), Data().open().held_out
    assert stories is not None
    prompts = prompts_of(stories, options.prompts, NextToken(), llm.tokenizer)
    engines = {"plain": Engine(llm.model, rows=1)}
    for method, chains in itertools.product(options.methods, options.draft_chains):
        drafter, name = open_drafter(method, options.model, "cpu", chains=chains), f"{method}, {chains}"
        engines[name] = Engine(llm.model, rows=chains, speculation=drafter, draft_tokens=options.draft_tokens)
        engines[name].speculation.costs = DraftCosts(1.0, 0.0)  # ty: ignore[invalid-assignment]
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    sampling, expected = Sampling(max_new=options.max_new, temperature=0, ignore_eos=True), {}
    for _ in range(options.runs):
        for name, engine in engines.items():
            start, count = time.process_time(), 0
            for i, ids in enumerate(prompts):
                found = [token.id for token in engine.generate(ids, sampling)]
                assert found == expected.setdefault(i, found), f"{name} has other tokens than plain decoding"
                count += len(found)
            seconds[name].append((time.process_time() - start) / count)
    plain = statistics.median(seconds["plain"])
    for name, engine in engines.items():
        own, gained = statistics.median(seconds[name]), ""
        if engine.speculation is not None:
            numbers = engine.speculation.statistics
            shares = ", ".join(f"{share:.0%}" for share in numbers.acceptance)
            gained = f"  {numbers.tokens_per_draft:.2f} tokens per forward  accepted {shares}"
        print(f"{name:<28} {own * 1e3:.2f} ms per token  speed-up {plain / own:.2f}{gained}")


if __name__ == "__main__":
    main()
