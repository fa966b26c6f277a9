"""Kernels that scan over time must keep time inside each thread. They are compiled for a GPU, which need not exist.

Triton chooses the layout of a tile over the threads of a warp, differently in each version. If time is distributed over
the lanes, the results are the same at a third of the speed, and the assembly contains shuffles between lanes.
"""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is not installed; its wheels are for Linux")

COMPILE = """
import sys
from importlib import import_module

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SIZES = {"N": 16, "T": 16, "BLOCK": 32, "WIDTH": 16, "SPAN": 256, "REVERSE": True}
HALF = {"U", "X", "Y", "K", "V", "Delta", "Out", "dY", "dU", "dDelta", "dOut", "dK", "dV"}
ALIGNED = [["tt.divisibility", 16]]

for module, name in (place.split(":") for place in sys.argv[1:]):
    kernel = getattr(import_module(f"regard.kernels.{module}"), name)
    signature, constants, known = {}, {}, {}
    for i, argument in enumerate(kernel.arg_names):
        if argument in SIZES or argument in ("Docs", "Documents", "Counted"):
            signature[argument], constants[i,] = "constexpr", SIZES.get(argument)
        elif argument.endswith("strides"):
            signature[argument] = ("i32", "i32")
            known |= {(i, 0): ALIGNED, (i, 1): ALIGNED}
        elif argument == "shift":
            signature[argument] = "i32"
        else:
            number = argument in ("length", "chunks", "channels", "spans")
            signature[argument] = "i32" if number else "*bf16" if argument in HALF else "*fp32"
            known[i,] = ALIGNED
    source = ASTSource(kernel, signature, constants, known)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1, "num_stages": 1})
    print(f"{module}:{name}", compiled.asm["ptx"].count("shfl."))
"""
KERNELS = [
    "recurrent.selective_scan.triton.kernels:add_kernel",
    "recurrent.selective_scan.triton.kernels:read_kernel",
    "recurrent.selective_scan.triton.kernels:grad_kernel",
    "recurrent.wkv.triton.kernels:add_kernel",
    "recurrent.wkv.triton.kernels:read_kernel",
    "recurrent.wkv.triton.kernels:grad_kernel",
]


@pytest.mark.slow
@pytest.mark.oldest
def test_time_stays_inside_each_thread() -> None:
    environment = {
        name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"
    }  # set for other tests
    command = [sys.executable, "-W", "ignore", "-c", COMPILE, *KERNELS]
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == [f"{kernel} 0" for kernel in KERNELS]
