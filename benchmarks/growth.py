"""Growth of time and memory with sequence length: `python -m benchmarks.growth [mixer …]` prints JSON.

Forward of two layers of width 256 on one float32 row. The work of these mixers is linear in n: 16k tokens take 16 times
as long as 1k tokens. The work of S4 is n log n: 16k tokens take up to 26 times as long. The mixers are compared with
transformers' Mamba and Mamba-2 without compiled kernels, and with torch's LSTM. Times are medians of interleaved
rounds. Memory is the rise of the peak during the forward, each in its own process. Decoding is measured after 100 and
after 10,000 tokens, which makes no difference to a recurrence.
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
from regard.parts.norm import NoNorm
from regard.parts.recurrent import LSTM
from regard.parts.ssm.mamba import Mamba
from regard.parts.ssm.mamba2 import Mamba2
from regard.parts.ssm.s4 import S4, S4D

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
    if isinstance(mixer, LSTM):  # as torch stacks them: no residual stream, no norm
        return (Repeat((Block((Sublayer(mixer, NoNorm()),), keep=0.0),), LAYERS),)
    return (Repeat((Block((Sublayer(mixer),)),), LAYERS),)


@cache
def candidate(name: str) -> Callable[[Tensor], object]:
    """A function of x (1, n, 256)."""
    torch.manual_seed(0)
    if name in MIXERS:
        stack = Stack(layers(MIXERS[name]), WIDTH).eval()
        return lambda x: stack(x, TokenLayout.whole(*x.shape[:2]))
    if name == "torch lstm":
        return nn.LSTM(WIDTH, WIDTH, LAYERS, batch_first=True).eval()
    return from_transformers(name)


def from_transformers(name: str) -> Callable[[Tensor], object]:
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
    """Seconds of one forward by candidate and length."""
    seconds: dict[str, dict[int, float]] = {name: {} for name in names}
    for length in lengths:
        print(f"forward of {length} tokens", file=sys.stderr)
        x = torch.randn(1, length, WIDTH)
        rates = interleave({name: partial(candidate(name), x) for name in seconds}, rounds, length)
        for name, rate in rates.items():
            seconds[name][length] = round(length / rate, 4)
    return seconds


@torch.inference_mode()
def peak(name: str, length: int) -> float:
    """MB by which one forward raises the peak of memory."""
    candidate(name)(torch.randn(1, 64, WIDTH))
    x = torch.randn(1, length, WIDTH)
    before = peak_resident()
    candidate(name)(x)
    return round(peak_resident() - before, 1)


def peak_resident() -> float:
    """The peak memory of this process so far in MB, on Linux. (getrusage would include the parent process.)"""
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


def peak_in_own_process(name: str, length: int) -> float:
    command = [sys.executable, "-m", "benchmarks.growth", "--peak", name, "--longest", str(length)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@torch.inference_mode()
def decoding(name: str, rounds: int) -> dict[str, float]:
    """Milliseconds per token of one row, after EARLY and LATE tokens."""

    def forward(store: Contiguous, positions: Tensor) -> None:
        layout = TokenLayout(positions.unsqueeze(0))
        stack(torch.randn(1, len(positions), WIDTH), layout, store.begin_forward(layout, check=False))

    def steps(store: Contiguous, cached: int) -> None:
        for position in range(cached, cached + STEPS):
            forward(store, torch.tensor([position]))

    repeats = layers(MIXERS[name])
    stack, candidates = Stack(repeats, WIDTH).eval(), {}
    for cached in (EARLY, LATE):
        store = Contiguous(state_declarations(repeats, WIDTH), 1, LATE + STEPS, torch.float32)
        forward(store, torch.arange(cached))
        candidates[f"after {cached}"] = partial(steps, store, cached)
    return {name: round(1000 / rate, 3) for name, rate in interleave(candidates, rounds, STEPS).items()}


def measure(
    rounds: int = 3, lengths: tuple[int, ...] = LENGTHS, mixers: tuple[str, ...] = tuple(MIXERS)
) -> dict[str, object]:
    first, last = lengths[0], lengths[-1]
    pairs = {name: PEERS[name] for name in mixers if name in PEERS}
    candidates = (*mixers, *pairs.values())
    seconds = times(candidates, lengths, rounds)
    faster = {name: seconds[peer][last] / seconds[name][last] for name, peer in pairs.items()}
    return {
        "growth_seconds": seconds,
        f"growth_ratio_{last}_to_{first}": {name: round(s[last] / s[first], 1) for name, s in seconds.items()},
        "growth_times_as_fast": {f"{name} as {pairs[name]}": round(ratio, 2) for name, ratio in faster.items()},
        "growth_peak_megabytes": {name: peak_in_own_process(name, last) for name in candidates},
        "growth_decode_milliseconds": {name: decoding(name, 5 * rounds) for name in mixers},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mixers", nargs="*", default=list(MIXERS), help=", ".join(MIXERS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--longest", type=int, default=LENGTHS[-1])
    parser.add_argument("--peak", help="print only the memory of this candidate")
    arguments = parser.parse_args()
    if arguments.peak:
        print(peak(arguments.peak, arguments.longest))
    else:
        lengths = tuple(length for length in LENGTHS if length <= arguments.longest)
        print(json.dumps(measure(arguments.rounds, lengths, tuple(arguments.mixers)), indent=2))


if __name__ == "__main__":
    main()
