"""Speculative decoding beside plain decoding, at batch 1: `python -m benchmarks.speculation [MODEL]`.

Runs alternate between the two engines. A ratio is of the same round, in wall time and in the CPU time of the process,
which other programs on the machine disturb less. The prompt has copies of a passage and its beginning once more, so
that the model quotes it: the best case of prompt lookup.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch

from regard.engine.engine import Engine
from regard.engine.request import Sampling
from regard.engine.speculation.lookahead import Lookahead
from regard.engine.speculation.prompt_lookup import PromptLookup
from regard.find_model import find_model
from regard.load_model import load

PASSAGE = """The harbour master keeps a list of every boat. On Monday the Heron left for the islands with nine crates of
apples, two of pears and a letter for the lighthouse. On Tuesday the Marlin came back from the north with salt, rope and
three passengers. On Wednesday nobody sailed, because the wind had turned to the west and the waves were too high. On
Thursday the Heron returned with an answer to the letter, and the Marlin was painted blue.

"""
METHODS = {"ngram": PromptLookup, "lookahead": Lookahead}


def measure(engine: Engine, ids: list[int], sampling: Sampling) -> tuple[float, float, list[int]]:
    """Seconds of wall and CPU time of the decode steps, and the new tokens."""
    request = engine.submit(ids, sampling)
    while not request.new:
        engine.step()
    wall, cpu = time.perf_counter(), time.process_time()
    while request.finish is None:
        engine.step()
    return time.perf_counter() - wall, time.process_time() - cpu, [token.id for token in request.new]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--method", choices=METHODS, default="ngram")
    parser.add_argument("--draft-tokens", type=int, default=15)
    parser.add_argument("--max-new", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--copies", type=int, default=2, help="of the passage in the prompt, before its beginning")
    parser.add_argument("--sentences", type=int, default=5, help="of the passage")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    llm = load(find_model(Path(options.model)))
    passage = ". ".join(PASSAGE.split(". ")[: options.sentences]).strip() + "\n\n"
    ids = llm.encode(passage * options.copies + passage[: len(passage) // 4], True)
    sampling = Sampling(max_new=options.max_new, temperature=0)
    plain = Engine(llm.model, rows=1, capacity=1024)
    drafting = Engine(
        llm.model, rows=1, capacity=1024, speculation=METHODS[options.method](), draft_tokens=options.draft_tokens
    )
    wall_ratios, cpu_ratios = [], []
    for number in range(options.rounds):
        wall, cpu, expected = measure(plain, ids, sampling)
        drafting_wall, drafting_cpu, found = measure(drafting, ids, sampling)
        wall_ratios.append(wall / drafting_wall)
        cpu_ratios.append(cpu / drafting_cpu)
        print(
            f"round {number}: plain {cpu / len(expected) * 1e3:.0f} ms of CPU per token, "
            f"drafts {drafting_cpu / len(found) * 1e3:.0f} ms, ratio {cpu_ratios[-1]:.2f} "
            f"(wall {wall_ratios[-1]:.2f}), {'equal' if found == expected else 'other'} tokens",
            flush=True,
        )
    metrics = drafting.metrics()
    print(
        f"median ratio: CPU {statistics.median(cpu_ratios):.2f}, wall {statistics.median(wall_ratios):.2f}; "
        f"{metrics['tokens_per_draft']:.1f} tokens per draft, "
        f"{metrics['accepted_draft_tokens']} of {metrics['draft_tokens']} accepted"
    )


if __name__ == "__main__":
    main()
