"""What differs between machines and versions of torch, in one place."""

import importlib.util
import os
import shutil
from inspect import signature
from typing import Any

import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None  # its wheels are for Linux
TRACES_GROUPED = torch.__version__ >= "2.15"  # grouped products of float32 in compiled graphs
# One function compiled for many models: without these, eight of them use up what torch allows one piece of code.
APART: dict[str, Any] = (
    {"isolate_recompiles": True} if "isolate_recompiles" in signature(torch.compile).parameters else {}
)


def cannot_compile(device: torch.device) -> str | None:
    """Why torch.compile would fail for this device; None when it works."""
    compilers = (os.environ.get("CXX", ""), "g++", "clang++", "c++")
    if device.type == "cpu" and not any(map(shutil.which, filter(None, compilers))):
        return "torch.compile needs a C++ compiler on a CPU (Debian: apt-get install g++); going on without"
    return None


def cannot_triton(device: torch.device) -> str | None:
    """Why Triton's kernels do not run on this device; None when they do."""
    if device.type != "cuda":
        return f"needs a CUDA GPU, not {device.type}"
    return None if HAS_TRITON else "needs triton, which is not installed"


def groups_matmul(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Does torch's grouped product take rows x (T, I) and matrices weight (X, O, I)?

    It knows no float64 and wants rows of whole 16 bytes, in its backward too.
    """
    aligned = all(size * x.element_size() % 16 == 0 for size in weight.shape[1:])
    traced = torch.compiler.is_compiling() or x.is_meta
    return x.dtype != torch.float64 and aligned and (x.dtype == torch.bfloat16 or not traced or TRACES_GROUPED)
