"""Loading a Llama folder of a billion parameters, compared with transformers' from_pretrained: time and peak memory.

    python -m benchmarks.importing [--layers 2] [--stored float32] [--folder FOLDER] [--rounds 3]

The folder is stored in bfloat16, as published ones are, or in float32; both libraries convert it to float32 for the
CPU. Each load runs in its own process, alternating. A process first loads a tiny model, so that imports do not count;
then its peak of resident memory is reset. transformers maps the file and reads it in the first forward, whereas our
model owns its memory, so the first forward is part of both figures. The file is in the page cache for both.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

SIZES = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 32000, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
TINY = SIZES | {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 64, "num_hidden_layers": 1}
LAYERS = 15  # 1.04 billion parameters
CANDIDATES = ("regard", "regard, mmap", "transformers")


def write_model(folder: Path, sizes: dict[str, int], dtype: torch.dtype) -> None:
    """Save a random model with transformers, in one file."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder, max_shard_size="100GB")
    torch.set_default_dtype(torch.float32)


def resident(field: str) -> int:
    """Bytes of resident memory: VmRSS is the current value, VmHWM the peak since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def load(name: str, folder: str) -> torch.nn.Module:
    if name.startswith("regard"):
        from regard.checkpoint import load

        return load(folder, dtype=torch.float32, mmap="mmap" in name)
    from transformers import LlamaForCausalLM, logging

    logging.disable_progress_bar()
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


def load_and_print(name: str, tiny: str, folder: str) -> None:
    """Load the model, run one forward and print the figures as JSON."""
    tokens = torch.arange(8)[None]
    with torch.inference_mode():
        load(name, tiny)(tokens)
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        start, cpu = time.perf_counter(), time.process_time()
        model = load(name, folder)
        loaded = time.perf_counter()
        out = model(tokens)
        done, cpu_seconds = time.perf_counter(), time.process_time() - cpu
    weights = sum(parameter.nbytes for parameter in model.parameters())
    largest = float((out if isinstance(out, torch.Tensor) else out.logits).abs().max())
    result = {"load_s": loaded - start, "forward_s": done - loaded, "total_s": done - start, "cpu_s": cpu_seconds}
    result |= {"peak": (resident("VmHWM") - before) / weights, "weights": weights, "largest_logit": largest}
    print(json.dumps(result))


def measure(layers: int = LAYERS, stored: str = "bfloat16", folder: str | None = None, rounds: int = 3) -> dict:
    with tempfile.TemporaryDirectory() as scratch:
        tiny, big = Path(scratch) / "tiny", Path(folder or f"{scratch}/big")
        write_model(tiny, TINY, getattr(torch, stored))
        if folder is None:
            print("writing the folder", file=sys.stderr)
            write_model(big, SIZES | {"num_hidden_layers": layers}, getattr(torch, stored))
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in CANDIDATES}
        for round_number in range(rounds + 1):  # the first is a warm-up that brings the file into the page cache
            for name in CANDIDATES:
                command = [sys.executable, "-m", "benchmarks.importing", "--child", name, str(tiny), str(big)]
                figures = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
                print(f"  round {round_number} of {rounds}: {name} {figures}", file=sys.stderr)
                runs[name] += [figures] * bool(round_number)
    medians = {
        name: {key: round(statistics.median(run[key] for run in figures), 3) for key in figures[0]}
        for name, figures in runs.items()
    }
    baseline = medians["transformers"]
    ratios = {
        name: {key: round(figures[key] / baseline[key], 3) for key in ("load_s", "total_s", "cpu_s")}
        for name, figures in medians.items()
    }
    return {"stored": stored, "medians": medians, "relative_to_transformers": ratios}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        load_and_print(*sys.argv[2:5])
    else:
        options = argparse.ArgumentParser()
        options.add_argument("--layers", type=int, default=LAYERS)
        options.add_argument("--stored", default="bfloat16", choices=["bfloat16", "float32"])
        options.add_argument("--folder")
        options.add_argument("--rounds", type=int, default=3)
        print(json.dumps(measure(**vars(options.parse_args())), indent=2))
