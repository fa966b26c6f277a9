"""Weights of few bits on this CPU beside llama.cpp: decoding, prompts and memory, one GGUF file for all programs.

python -m benchmarks.packed [--models smollm2 100m] [--formats q8_0 q4_0 q4_k_m] [--rounds 9] [--threads 2]
                            [--native FOLDER] [--only regard …]

SmolLM2-135M is the installed one, dequantized and written again in each format; 100m is the model of decode.py. Every
program runs in a process of its own (packed_worker.py), which waits while another one runs; the programs take turns,
and the medians of the rounds are compared. `xllamacpp` is llama.cpp for any x86 or ARM machine. `llama-cpp-python`
compiles it for this one and is measured too if it is installed, or in FOLDER (pip install --target FOLDER).
Memory is the peak of resident memory (VmHWM), with Python and all libraries.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.packed_worker import PROGRAMS, WORK

UNITS = {"decode": 128, "prompt": 512}  # tokens


def write_files(name: str, formats: list[str], folder: Path) -> None:
    """In a process of its own: the float32 model and its copies are not needed later."""
    from benchmarks.decode import CONFIG
    from regard.checkpoint import load
    from regard.checkpoint.gguf import export_gguf
    from regard.families import llama
    from regard.text.tokenizer import Tokenizer
    from regard.text.train import bpe
    from regard.text.write_gguf import gguf_metadata

    if name == "smollm2":
        model: Any = load("smollm2")
        tokenizer = Tokenizer.load("smollm2")
    else:
        model, tokenizer = llama.spec(CONFIG.to_dict()).build(seed=0), bpe(["a text of some words, some again"], 288)
    for format in formats:
        metadata = gguf_metadata(tokenizer, model.spec.vocab)
        export_gguf(model, folder / f"{name}-{format}.gguf", "llama", format, metadata)  # ty: ignore[invalid-argument-type]


class Worker:
    def __init__(self, program: str, file: Path, threads: int, native: str | None):
        command = [sys.executable, "-m", "benchmarks.packed_worker", program, str(file), str(threads)]
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), native]))
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=environment,
        )  # fmt: skip
        assert self.read() == "ready", f"{program} cannot open {file}"

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def run(self, work: str) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{work}\n")
        self.process.stdin.flush()
        return json.loads(self.read())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def compare(programs: list[str], file: Path, rounds: int, threads: int, native: str | None) -> None:
    workers = {program: Worker(program, file, threads, native) for program in programs}
    answers: dict[tuple[str, str], list[dict[str, float]]] = {}
    for round_number in range(rounds + 1):
        for work in WORK:
            for program, worker in workers.items():
                answer = worker.run(work)
                if round_number:  # the first is a warm-up
                    answers.setdefault((work, program), []).append(answer)
    for worker in workers.values():
        worker.close()
    for work in WORK:
        rates = {p: UNITS[work] / median(answers[work, p], "seconds") for p in programs}
        cpu = {p: median(answers[work, p], "cpu") / UNITS[work] * 1000 for p in programs}
        best = max((rate for p, rate in rates.items() if p != "regard"), default=float("nan"))
        cells = [f"{p} {rates[p]:7.1f} tokens/s ({cpu[p]:6.2f} ms CPU)" for p in programs]
        print(f"{file.stem:16} {work:6}  {'  '.join(cells)}  ratio {rates.get('regard', 0) / best:.2f}", flush=True)
    memory = {p: median(answers["prompt", p], "memory") / 2**20 for p in programs}
    least = min((size for p, size in memory.items() if p != "regard"), default=float("nan"))
    cells = [f"{p} {size:7.0f} MiB" for p, size in memory.items()]
    print(f"{file.stem:16} memory  {'  '.join(cells)}  ratio {memory.get('regard', 0) / least:.2f}", flush=True)


def median(answers: list[dict[str, float]], name: str) -> float:
    return statistics.median(answer[name] for answer in answers)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=["smollm2", "100m"])
    parser.add_argument("--formats", nargs="+", default=["q8_0", "q4_0", "q4_k_m"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--native", help="a folder with llama-cpp-python")
    parser.add_argument("--only", nargs="+", choices=list(PROGRAMS), help="these programs")
    parser.add_argument("--folder", type=Path, help="keep the files here")
    parser.add_argument("--write", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        return write_files(options.write, options.formats, options.folder)
    has_native = options.native or importlib.util.find_spec("llama_cpp")
    programs = options.only or [p for p in PROGRAMS if p != "llama-cpp-python" or has_native]
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        for name in options.models:
            missing = [f for f in options.formats if not (folder / f"{name}-{f}.gguf").exists()]
            if missing:
                write = ["--write", name, "--formats", *missing, "--folder", str(folder)]
                subprocess.run([sys.executable, "-m", "benchmarks.packed", *write], check=True)
            for format in options.formats:
                file = folder / f"{name}-{format}.gguf"
                compare(programs, file, options.rounds, options.threads, options.native)


if __name__ == "__main__":
    main()
