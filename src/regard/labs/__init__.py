"""Labs: a claim about transformers or their ancestors, tried out in minutes on a CPU, with a plot and a verdict.

A lab is one module here. Its docstring names the claim (first line) and the experiment; `run(bench)` does it and gives
back Findings. The verdict is read off the numbers and may contradict the claim.
"""

import ast
import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

from regard.spec import nearest

LABS = {  # name: module in this room
    "gradients-through-time": "gradients",
    "universal-approximation": "universal",
    "words-by-place": "slots",
    "serial-time": "serial",
    "memory-span": "span",
    "state-capacity": "squeeze",
    "gru-or-lstm": "gates",
    "one-vector-translation": "translation",
    "attention-scores": "scores",
    "ladder": "ladder",
    "long-range": "long_range",
    "selective-copying": "selective",
    "mamba-language": "language",
    "recall-budget": "budget",
    "streaming": "streaming",
    "hybrids": "hybrids",
}


def module_of(name: str) -> ModuleType:
    if name not in LABS:
        raise ValueError(f"no lab is called {name!r}; {nearest(name, LABS)}; regard lab --list says what they claim")
    return importlib.import_module(f"regard.labs.{LABS[name]}")


def documentation(name: str) -> str:
    """A lab's docstring, read without running its imports."""
    found = importlib.util.find_spec(f"regard.labs.{LABS[name]}")
    assert found is not None and found.origin is not None, f"the lab {name} has no module"
    return ast.get_docstring(ast.parse(Path(found.origin).read_text(encoding="utf-8"))) or ""


def claim(name: str) -> str:
    return documentation(name).partition("\n")[0]
