"""What differs between machines and versions of torch, in one place."""

import os
import shutil

import torch


def cannot_compile(device: torch.device) -> str | None:
    """Why torch.compile would fail for this device; None when it works."""
    compilers = (os.environ.get("CXX", ""), "g++", "clang++", "c++")
    if device.type == "cpu" and not any(map(shutil.which, filter(None, compilers))):
        return "torch.compile needs a C++ compiler on a CPU (Debian: apt-get install g++); going on without"
    return None
