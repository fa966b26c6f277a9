"""RNN, LSTM and GRU compared with torch's on this CPU: `python -m benchmarks.recurrence` prints tokens/s as JSON.

Two layers of width 256 in float32: forward of one row of 16k tokens, and forward and backward of eight rows of 256.
Each of these rows is eight packed documents for us and one for torch, whose modules do not support documents. Measure
on an idle machine.
"""

import argparse
import json
import platform
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.timing import interleave
from regard.layout import TokenLayout
from regard.models.stack import Repeat, Stack
from regard.parts.block import Block, Sublayer
from regard.parts.norm import NoNorm
from regard.parts.recurrent import GRU, LSTM, RNN, RecurrentMixer

WIDTH, LAYERS = 256, 2
Kind = Callable[..., nn.Module]
KINDS: dict[str, tuple[RecurrentMixer, Kind]] = {
    "rnn": (RNN(), nn.RNN),
    "lstm": (LSTM(), nn.LSTM),
    "gru": (GRU(), nn.GRU),
}


def stack(spec: RecurrentMixer) -> Stack:
    block = Block((Sublayer(spec, NoNorm()),), keep=0.0)
    return Stack((Repeat((block,), LAYERS),), WIDTH)


def forward(spec: RecurrentMixer, kind: Kind, length: int, rounds: int) -> dict[str, float]:
    module, torch_module = stack(spec), kind(WIDTH, WIDTH, LAYERS, batch_first=True)
    x, layout = torch.randn(1, length, WIDTH), TokenLayout.whole(1, length)
    with torch.inference_mode():
        return interleave({"regard": lambda: module(x, layout), "torch": lambda: torch_module(x)}, rounds, length)


def training(spec: RecurrentMixer, kind: Kind, rounds: int) -> dict[str, float]:
    module, torch_module = stack(spec), kind(WIDTH, WIDTH, LAYERS, batch_first=True)
    x, length, document = torch.randn(8, 256, WIDTH), 256, 32
    slots = torch.arange(length).expand(8, length)

    def step(out: Tensor) -> None:
        out.square().mean().backward()

    return interleave(
        {
            "regard, packed": lambda: step(module(x, TokenLayout(slots % document, slots // document))[0]),
            "torch, unpacked": lambda: step(torch_module(x)[0]),
        },
        rounds,
        x.shape[0] * length,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    machine = {"machine": platform.machine(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    rates = {
        name: {
            "forward": forward(*kind, arguments.length, arguments.rounds),
            "training": training(*kind, arguments.rounds),
        }
        for name, kind in KINDS.items()
    }
    print(json.dumps({"machine": machine, "tokens_per_second": rates}, indent=2))


if __name__ == "__main__":
    main()
