"""One program with one GGUF file in a process of its own, for packed.py: it runs the work that stdin names.

python -m benchmarks.packed_worker PROGRAM FILE THREADS

decode: 128 steps after a prompt of 128 tokens, greedy. prompt: 512 tokens up to the first new one. Each answer is a
line of JSON: seconds, seconds of CPU time of the whole process, and its peak of resident memory in bytes.
"""

import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

CONTEXT = 1024
WORK = {"decode": (128, 129), "prompt": (512, 1)}  # tokens of the prompt, new tokens
Run = Callable[[list[int], int], tuple[float, float]]  # prompt, new tokens -> seconds of the prompt, of what follows


def open_regard(file: str, threads: int) -> Run:
    import torch

    from regard.adapt import pack_weights
    from regard.checkpoint import load
    from regard.engine.engine import Engine
    from regard.engine.request import Sampling

    torch.set_num_threads(threads)
    model = load(file, packed=True)
    pack_weights(model)
    engine = Engine(model, rows=1, capacity=CONTEXT, compile=True, prefix_cache=False, chunk=512)

    def run(prompt: list[int], new: int) -> tuple[float, float]:
        start = time.perf_counter()
        request = engine.submit(prompt, Sampling(max_new=new, temperature=0))
        while not request.new:
            engine.step()
        first = time.perf_counter()
        while not engine.idle:
            engine.step()
        assert len(request.new) == new
        return first - start, time.perf_counter() - first

    return run


def open_xllamacpp(file: str, threads: int) -> Run:
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path = file
    settings.n_ctx, settings.n_parallel, settings.n_gpu_layers = CONTEXT, 1, 0
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(settings)

    def run(prompt: list[int], new: int) -> tuple[float, float]:
        body = {"prompt": prompt, "n_predict": new, "temperature": 0, "cache_prompt": False, "ignore_eos": True}
        timings = server.handle_completions(body)["timings"]
        assert timings["predicted_n"] == new
        return timings["prompt_ms"] / 1000, timings["predicted_ms"] / 1000

    return run


def open_llama_cpp(file: str, threads: int) -> Run:
    """llama-cpp-python, which pip compiles for this CPU. Only its C functions: its Python code copies all logits."""
    import llama_cpp

    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(file.encode(), llama_cpp.llama_model_default_params())
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx, settings.n_threads, settings.n_threads_batch = CONTEXT, threads, threads
    context = llama_cpp.llama_init_from_model(model, settings)
    sampler = llama_cpp.llama_sampler_init_greedy()
    memory = llama_cpp.llama_get_memory(context)

    def decode(ids: list[int]) -> int:
        tokens = (llama_cpp.llama_token * len(ids))(*ids)
        assert llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, len(ids))) == 0
        return llama_cpp.llama_sampler_sample(sampler, context, -1)

    def run(prompt: list[int], new: int) -> tuple[float, float]:
        llama_cpp.llama_memory_clear(memory, True)
        start = time.perf_counter()
        token = decode(prompt)
        first = time.perf_counter()
        for _ in range(new - 1):
            token = decode([token])
        return first - start, time.perf_counter() - first

    return run


PROGRAMS = {"regard": open_regard, "xllamacpp": open_xllamacpp, "llama-cpp-python": open_llama_cpp}


def peak_memory() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main(program: str, file: str, threads: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp writes to the standard output too
    run = PROGRAMS[program](file, int(threads))
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        length, new = WORK[line.strip()]
        prompt, cpu = random.Random(0).choices(range(300, 3000), k=length), time.process_time()
        seconds = run(prompt, new)[new > 1]
        answer = {"seconds": seconds, "cpu": time.process_time() - cpu, "memory": peak_memory()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
