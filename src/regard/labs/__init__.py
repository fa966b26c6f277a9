"""Labs: short experiments that test claims about transformers and earlier models, each with a plot and a verdict.

A lab is one module in this package. The first line of its docstring is the claim, the rest describes the experiment.
`run(bench)` measures with one seed and returns Findings; `regard lab` runs it with several seeds and combines them. The
verdict follows from the measured numbers and may contradict the claim.
"""

import ast
import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

from regard.spec import suggest_name

LABS = {  # name: the number of seeds, unless the user chooses another
    "gradients-through-time": 5,
    "vanishing-gradients": 5,
    "universal-approximation": 5,
    "words-by-place": 3,
    "serial-time": 3,
    "memory-span": 3,
    "state-capacity": 3,
    "gru-or-lstm": 3,
    "one-vector-translation": 3,
    "attention-scores": 3,
    "attention-temperature": 3,
    "missing-mask": 3,
    "deep-stacks": 3,
    "warmup": 3,
    "idle-layers": 3,
    "head-counts": 3,
    "block-parts": 3,
    "alignment": 3,
    "own-encoder": 3,
    "one-decoder": 3,
    "converted-decoder": 3,
    "tuned-encoder": 3,
    "ladder": 3,
    "extrapolation": 3,
    "attention-growth": 3,
    "short-training": 3,
    "scaled-rope": 3,
    "exact-distance": 3,
    "without-positions": 3,
    "shuffled-patches": 3,
    "windows": 3,
    "tiled-attention": 3,
    "wrong-bets": 3,
    "long-recipe": 3,
    "long-range": 3,
    "selective-copying": 3,
    "mamba-language": 3,
    "recall-budget": 3,
    "streaming": 3,
    "hybrids": 3,
    "both-sides": 3,
    "vocabulary-size": 3,
    "similar-words": 3,
    "one-block": 3,
    "vit-or-cnn": 3,
    "whole-sequences": 3,
    "engine-speed": 3,
    "ai-feedback": 3,
    "induction-heads": 3,
    "attention-sinks": 3,
    "attention-collapse": 3,
    "maps-and-reasons": 3,
    "syntax-heads": 3,
    "forced-temperature": 3,
    "stored-facts": 3,
    "retrieved-facts": 3,
    "word-senses": 3,
    "head-jobs": 3,
    "update-rank": 3,
    "lora-rates": 3,
    "lora-capacity": 3,
    "lora-layers": 3,
    "lora-batch": 3,
    "qlora": 3,
    "few-bits": 3,
    "outliers": 3,
    "cache-sinks": 3,
    "drafts": 3,
    "bytes-and-speed": 3,
    "preference-tuning": 3,
    "rank-one-rl": 3,
    "specialist": 3,
    "scaling-laws": 3,
    "code-size": 3,
    "code-holes": 3,
    "gan-stalemate": 3,
    "gan-failures": 3,
    "generative-families": 3,
    "experts": 3,
    "expert-batches": 3,
}


def module_of(name: str) -> ModuleType:
    if name not in LABS:
        raise ValueError(f"there is no lab {name!r}; {suggest_name(name, LABS)}; regard lab --list shows their claims")
    return importlib.import_module(module_name(name))


def module_name(name: str) -> str:
    return f"regard.labs.{name.replace('-', '_')}"


def documentation(name: str) -> str:
    """A lab's docstring, read without importing the lab."""
    found = importlib.util.find_spec(module_name(name))
    assert found is not None and found.origin is not None, f"the lab {name} has no module"
    return ast.get_docstring(ast.parse(Path(found.origin).read_text(encoding="utf-8"))) or ""


def claim(name: str) -> str:
    return documentation(name).partition("\n")[0]
