"""Compile the C++ files for this machine on first use. The library is kept in a folder of the user's cache."""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch

FOLDER = Path(__file__).parent
SOURCES = [FOLDER / "packed_linear.cpp", FOLDER / "decode_stack.cpp"]
HEADERS = [FOLDER / "products.h", FOLDER / "vectors.h"]
# All instructions of this CPU. With errno or traps, loops with nearbyint would not be vectorized.
FLAGS = ["-std=c++20", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-w"]


def cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "regard" / "kernels"


@cache
def load_library() -> str | None:
    """Compile the operators of `torch.ops.regard` if needed, and load them. Returns why that is impossible, or None."""
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "c++", "clang++")), None)
    if compiler is None:
        return "there is no C++ compiler (g++ or clang++)"
    try:
        torch.ops.load_library(compiled(compiler))
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        output = getattr(error, "stderr", "") or str(error)
        reason = output.strip().splitlines()[0] if output.strip() else error
        return f"{compiler} cannot compile the kernels in {FOLDER.name}: {reason}"
    return None


def compiled(compiler: str) -> Path:
    """The library for these sources, compiler, CPU and torch."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    sources = [path.read_text() for path in (*SOURCES, *HEADERS)]
    parts = [*sources, *FLAGS, version, torch.__version__, platform.machine(), cpu_features()]
    folder = cache_folder()
    library = folder / f"packed_linear_{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:16]}.so"
    if library.exists():
        return library
    print("compiling the kernels for weights of few bits, once …", file=sys.stderr, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        built, objects = Path(temporary) / library.name, []
        for source in SOURCES:
            objects.append(str(Path(temporary) / f"{source.stem}.o"))
            command = [compiler, *FLAGS, f"-I{root / 'include'}", "-c", str(source), "-o", objects[-1]]
            subprocess.run(command, capture_output=True, text=True, check=True)
        # Without -fopenmp: the threads are those of torch, whose OpenMP library is loaded already.
        link = [compiler, "-shared", *objects, f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10", "-o", str(built)]
        subprocess.run(link, capture_output=True, text=True, check=True)
        built.rename(library)  # whole or not at all
    return library


def cpu_features() -> str:
    """The instructions of this CPU: a library compiled for another one may not run here."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
