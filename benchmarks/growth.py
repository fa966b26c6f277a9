"""How time and memory grow with the text: `python -m benchmarks.growth [mixer …]` prints JSON.

Two layers, 256 wide, one float32 row, forward: mixers whose work is linear in n (the ratio of 16k tokens to 1k is 16,
of S4, n log n, up to 26) beside transformers' Mamba and Mamba-2 as they run without compiled kernels, and torch's LSTM.
Times are medians of interleaved rounds. Memory is the peak above an idle process, each in a process of its own.
Decoding is a token behind 100 others and behind 10,000, which a recurrence does not tell apart.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.timing import interleave
from regard.engine.stores.contiguous import Contiguous
from regard.layout import TokenLayout
from regard.models.stack import Repeat, Stack, state_declarations
from regard.parts.block import Block, Sublayer
from regard.parts.body import Body
from regard.parts.linear_attention import LinearAttention
from regard.parts.lstm import LSTM
from regard.parts.norm import NoNorm
from regard.parts.ssm.mamba import Mamba
from regard.parts.ssm.mamba2 import Mamba2
from regard.parts.ssm.s4 import S4
from regard.parts.ssm.s4d import S4D

WIDTH, LAYERS = 256, 2
LENGTHS = (1024, 2048, 4096, 8192, 16384)
EARLY, LATE, STEPS = 100, 10_000, 32
MIXERS: dict[str, Body] = {
    "linear": LinearAttention(4),
    "s4": S4(),
    "s4d": S4D(),
    "mamba": Mamba(),
    "mamba2": Mamba2(),
    "lstm": LSTM(),
}
PEERS = {"mamba": "transformers mamba", "mamba2": "transformers mamba2", "lstm": "torch lstm"}


def layers(mixer: Body) -> tuple[Repeat, ...]:
    if isinstance(mixer, LSTM):  # as torch stacks them: no stream beside, no norm
        return (Repeat((Block((Sublayer(mixer, NoNorm()),), keep=0.0),), LAYERS),)
    return (Repeat((Block((Sublayer(mixer),)),), LAYERS),)


@cache
def contender(name: str) -> Callable[[Tensor], object]:
    """What reads x (1, n, 256)."""
    torch.manual_seed(0)
    if name in MIXERS:
        stack = Stack(layers(MIXERS[name]), WIDTH).eval()
        return lambda x: stack(x, TokenLayout.whole(*x.shape[:2]))
    if name == "torch lstm":
        return nn.LSTM(WIDTH, WIDTH, LAYERS, batch_first=True).eval()
    return foreign(name)


def foreign(name: str) -> Callable[[Tensor], object]:
    import transformers

    transformers.logging.set_verbosity_error()
    common = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "vocab_size": 8, "use_cache": False}
    if name == "transformers mamba":
        model = transformers.MambaModel(transformers.MambaConfig(**common)).eval()
    else:
        config = transformers.Mamba2Config(num_heads=2 * WIDTH // 64, head_dim=64, n_groups=1, **common)
        model = transformers.Mamba2Model(config).eval()
    return lambda x: model(inputs_embeds=x)


@torch.inference_mode()
def times(names: Iterable[str], lengths: tuple[int, ...], rounds: int) -> dict[str, dict[int, float]]:
    """Seconds of one forward by contender and length."""
    found: dict[str, dict[int, float]] = {name: {} for name in names}
    for length in lengths:
        print(f"forward of {length} tokens", file=sys.stderr)
        x = torch.randn(1, length, WIDTH)
        rates = interleave({name: partial(contender(name), x) for name in found}, rounds, length)
        for name, rate in rates.items():
            found[name][length] = round(length / rate, 4)
    return found


@torch.inference_mode()
def peak(name: str, length: int) -> float:
    """MB that one forward took above what was in use before."""
    contender(name)(torch.randn(1, 64, WIDTH))
    x = torch.randn(1, length, WIDTH)
    idle = most_in_use()
    contender(name)(x)
    return round(most_in_use() - idle, 1)


def most_in_use() -> float:
    """MB, of this process so far; getrusage would count what the process that started it had. On Linux."""
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


def peak_apart(name: str, length: int) -> float:
    command = [sys.executable, "-m", "benchmarks.growth", "--peak", name, "--longest", str(length)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@torch.inference_mode()
def decoding(name: str, rounds: int) -> dict[str, float]:
    """Milliseconds a token of one row, behind so many others."""

    def steps(store: Contiguous, behind: int) -> None:
        for t in range(behind, behind + STEPS):
            stack(
                torch.randn(1, 1, WIDTH), now := TokenLayout(torch.tensor([[t]])), store.begin_forward(now, check=False)
            )

    runs = layers(MIXERS[name])
    stack, works = Stack(runs, WIDTH).eval(), {}
    for behind in (EARLY, LATE):
        store = Contiguous(state_declarations(runs, WIDTH), 1, LATE + STEPS, torch.float32)
        stack(
            torch.randn(1, behind, WIDTH),
            now := TokenLayout(torch.arange(behind).unsqueeze(0)),
            store.begin_forward(now, check=False),
        )
        works[f"behind {behind}"] = partial(steps, store, behind)
    return {behind: round(1000 / rate, 3) for behind, rate in interleave(works, rounds, STEPS).items()}


def measure(
    rounds: int = 3, lengths: tuple[int, ...] = LENGTHS, mixers: tuple[str, ...] = tuple(MIXERS)
) -> dict[str, object]:
    first, last = lengths[0], lengths[-1]
    pairs = {name: PEERS[name] for name in mixers if name in PEERS}
    contenders = (*mixers, *pairs.values())
    seconds = times(contenders, lengths, rounds)
    faster = {name: seconds[peer][last] / seconds[name][last] for name, peer in pairs.items()}
    return {
        "growth_seconds": seconds,
        f"growth_ratio_{last}_to_{first}": {name: round(s[last] / s[first], 1) for name, s in seconds.items()},
        "growth_times_as_fast": {f"{name} as {pairs[name]}": round(times, 2) for name, times in faster.items()},
        "growth_peak_megabytes": {name: peak_apart(name, last) for name in contenders},
        "growth_decode_milliseconds": {name: decoding(name, 5 * rounds) for name in mixers},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mixers", nargs="*", default=list(MIXERS), help=", ".join(MIXERS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--longest", type=int, default=LENGTHS[-1])
    parser.add_argument("--peak", help="only the memory of this contender")
    asked = parser.parse_args()
    if asked.peak:
        print(peak(asked.peak, asked.longest))
    else:
        lengths = tuple(length for length in LENGTHS if length <= asked.longest)
        print(json.dumps(measure(asked.rounds, lengths, tuple(asked.mixers)), indent=2))


if __name__ == "__main__":
    main()
