"""`regard doctor`: what is installed, what works, what is missing and how to get it."""

import importlib.metadata
import json
import os
import platform
import shutil
from typing import Annotated, Any

import typer

CORE = ("torch", "numpy", "safetensors", "tokenizers", "jinja2", "rich", "typer")
EXTRAS = {"serve": ("fastapi", "uvicorn"), "plots": ("matplotlib",), "logs": ("tensorboard",), "gguf": ("gguf",)}


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Say what is installed, what works, what is missing.

    Every attention backend is tried on every device and held against the reference.

    \b
    Example:
      regard doctor --json
    """
    found = examine()
    if as_json:
        print(json.dumps(found, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("what", "state", "remedy", title="regard doctor", title_justify="left")
    for name, state, remedy in rows(found):
        table.add_row(name, f"[green]{state}[/]" if not remedy else f"[yellow]{state}[/]", remedy)
    Console().print(table)


def examine() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "packages": {name: version(name) for name in CORE + sum(EXTRAS.values(), ())},
        "devices": devices(),
        "attention": {device: attention(device) for device in devices()},
        "compiler": shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++"),
    }


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def devices() -> dict[str, str]:
    import torch

    gpus = {f"cuda:{i}": torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    return {"cpu": f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}", **gpus}


def attention(device: str) -> dict[str, str]:
    """Each backend, tried on a small input and held against the reference in float64."""
    import torch

    from regard.kernels.attention import BACKENDS, backend
    from regard.kernels.attention.patterns.window import Window
    from regard.kernels.attention.score_options import ScoreOptions
    from regard.layout import TokenLayout

    q, k, v = (torch.randn(1, heads, 8, 16, device=device, dtype=torch.float64) for heads in (4, 2, 2))
    layout = TokenLayout.whole(1, 8, device)
    oracle = backend("reference")(q, k, v, layout, ScoreOptions(Window(4), 0.25))
    result = {}
    for name, module in BACKENDS.items():
        case = (q.float(), k.float(), v.float(), layout, ScoreOptions(Window(4), 0.25))
        if (reason := module.refuses(*case)) is not None:
            result[name] = f"not here: {reason}"
            continue
        try:
            out = backend(name)(*case)
            result[name] = "works" if (out - oracle).abs().max() < 1e-5 else "gives wrong numbers"
        except RuntimeError as error:
            result[name] = f"fails: {error}"
    return result


def rows(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    remedy = {package: f"pip install 'regard[{extra}]'" for extra, names in EXTRAS.items() for package in names}
    lines = [("python", found["python"], "")]
    for name, have in found["packages"].items():
        lines.append((name, have or "missing", "" if have else remedy.get(name, f"pip install {name}")))
    lines += [(device, what, "") for device, what in found["devices"].items()]
    for device, backends in found["attention"].items():
        for name, state in backends.items():
            remedy = "use another backend" if state.startswith(("fails", "gives")) else ""
            lines.append((f"attention {name} on {device}", state, remedy))
    compiler = found["compiler"]
    lines.append(
        ("C++ compiler (for --train.compile on CPUs)", compiler or "missing", "" if compiler else "install g++")
    )
    return lines
