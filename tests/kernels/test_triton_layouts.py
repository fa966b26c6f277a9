"""Kernels that scan over time must keep the time axis inside each thread. The test compiles them and needs no GPU.

Triton chooses the layout of a tile over the threads of a warp, differently in each version. If the time axis is
distributed over the lanes, the results are the same at a third of the speed, and the assembly contains shuffles between
lanes.
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

for module, name in (path.split(":") for path in sys.argv[1:]):
    kernel = getattr(import_module(f"regard.kernels.{module}"), name)
    signature, constants, attributes = {}, {}, {}
    for i, argument in enumerate(kernel.arg_names):
        if argument in SIZES or argument in ("Documents", "Updates"):
            signature[argument], constants[i,] = "constexpr", SIZES.get(argument)
        elif argument.endswith("strides"):
            signature[argument] = ("i32", "i32")
            attributes |= {(i, 0): ALIGNED, (i, 1): ALIGNED}
        elif argument == "shift":
            signature[argument] = "i32"
        else:
            is_size = argument in ("length", "chunks", "channels", "spans")
            signature[argument] = "i32" if is_size else "*bf16" if argument in HALF else "*fp32"
            attributes[i,] = ALIGNED
    source = ASTSource(kernel, signature, constants, attributes)
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
def test_time_axis_stays_inside_each_thread() -> None:
    environment = {
        name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"
    }  # set for other tests
    command = [sys.executable, "-W", "ignore", "-c", COMPILE, *KERNELS]
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == [f"{kernel} 0" for kernel in KERNELS]
