"""`make bench`: training, decoding and long sequences on this CPU, compared with transformers; prints JSON."""

import json
import platform
import sys

import torch
import transformers

from benchmarks import decode, growth, train


def main() -> None:
    transformers.logging.set_verbosity_error()
    machine = {"machine": platform.machine(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    result = {"machine": machine | {"transformers": transformers.__version__}}
    for module in (train, decode, growth):
        print(f"measuring {module.__name__.split('.')[-1]}", file=sys.stderr)
        result |= module.measure()
    print(json.dumps(result, indent=2))


main()
