"""The engine on this CPU beside llama.cpp and transformers, interleaved; the model of decode.py in float32.

python -m benchmarks.cpu_engine [one] [eight] [ragged]

one, eight: as many requests at once, each a prompt of 128 tokens and 128 new ones, greedy. llama.cpp keeps keys and
values in float32 too. ragged: 32 requests with prompts of 16 to 256 and 16 to 128 new tokens, beside transformers'
generate: one by one, in one padded batch, and in four batches of similar numbers of new tokens.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import xllamacpp
from transformers import LlamaForCausalLM

from benchmarks.decode import CONFIG
from benchmarks.timing import interleave
from regard.checkpoint.gguf import export_gguf
from regard.engine.engine import Engine
from regard.engine.request import Sampling
from regard.families import llama
from regard.models.decoder import DecoderModule
from regard.text.train import bpe
from regard.text.write_gguf import gguf_metadata

PROMPT, NEW = 128, 128
RAGGED, BATCH = 32, 8
Work = list[tuple[list[int], int]]  # prompts with the number of new tokens


def random_work(lengths: list[tuple[int, int]], vocab: int = CONFIG.vocab_size, seed: int = 0) -> Work:
    """lengths: of each prompt and its new tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randint(vocab, (prompt,), generator=generator).tolist(), new) for prompt, new in lengths]


def run_engine(engine: Engine, work: Work) -> None:
    requests = [engine.submit(ids, Sampling(max_new=new, temperature=0)) for ids, new in work]
    while not engine.idle:
        engine.step()
    assert [len(request.new) for request in requests] == [new for _, new in work]


def open_llama_cpp(file: Path, rows: int) -> xllamacpp.Server:
    settings = xllamacpp.CommonParams()
    settings.model.path = str(file)
    settings.n_ctx, settings.n_parallel, settings.n_gpu_layers = rows * 512, rows, 0
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = torch.get_num_threads()
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    return xllamacpp.Server(settings)


def run_llama_cpp(server: xllamacpp.Server, work: Work) -> None:
    def complete(ids: list[int], new: int) -> None:
        body = {"prompt": ids, "n_predict": new, "temperature": 0, "cache_prompt": False, "ignore_eos": True}
        response = server.handle_completions(body)
        assert response["usage"]["completion_tokens"] == new

    with ThreadPoolExecutor(len(work)) as pool:
        list(pool.map(complete, *zip(*work, strict=True)))


def measure(rows: int, model: DecoderModule, file: Path, rounds: int) -> dict[str, object]:
    work = random_work([(PROMPT, NEW)] * rows)
    server = open_llama_cpp(file, rows)
    candidates = engines(model, rows, work) | {"llama.cpp": lambda: run_llama_cpp(server, work)}
    return compare(candidates, rounds, work)


def engines(model: DecoderModule, rows: int, work: Work) -> dict[str, Callable[[], object]]:
    eager, compiled = (
        Engine(model, rows=rows, capacity=512, compile=compile, prefix_cache=False) for compile in (False, True)
    )
    return {"regard": lambda: run_engine(eager, work), "regard compiled": lambda: run_engine(compiled, work)}


def compare(candidates: dict[str, Callable[[], object]], rounds: int, work: Work) -> dict[str, object]:
    """New tokens per second, and the ratio of our best to the best peer."""
    rates = interleave(candidates, rounds, sum(new for _, new in work))
    ours = [rates.pop(name) for name in list(rates) if name.startswith("regard")]
    return (
        {"regard": ours[0], "regard compiled": ours[1]} | rates | {"ratio": round(max(ours) / max(rates.values()), 3)}
    )


def measure_ragged(model: DecoderModule, rounds: int) -> dict[str, object]:
    lengths = torch.randint(16, 257, (RAGGED,), generator=torch.Generator().manual_seed(1)).tolist()
    news = torch.randint(16, 129, (RAGGED,), generator=torch.Generator().manual_seed(2)).tolist()
    work = random_work(list(zip(lengths, news, strict=True)))
    similar = sorted(work, key=lambda pair: pair[1])
    batches = [similar[i : i + BATCH] for i in range(0, RAGGED, BATCH)]
    torch.manual_seed(0)
    peer = LlamaForCausalLM(CONFIG).eval()
    candidates = engines(model, RAGGED, work) | {
        "transformers, one by one": lambda: [generate(peer, [pair]) for pair in work],
        "transformers, one batch": lambda: generate(peer, work),
        "transformers, four batches": lambda: [generate(peer, batch) for batch in batches],
    }
    return compare(candidates, rounds, work)


@torch.inference_mode()
def generate(peer: LlamaForCausalLM, work: Work) -> None:
    """Padded on the left, as transformers needs it; a batch runs until its last request has its tokens."""
    longest, new = max(len(ids) for ids, _ in work), max(new for _, new in work)
    ids = torch.tensor([[0] * (longest - len(ids)) + ids for ids, _ in work])
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids, _ in work])
    peer.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)


def main(parts: list[str]) -> None:
    model = llama.spec(CONFIG.to_dict()).build(seed=0)
    tokenizer = bpe(["a text of some words, some of them again"], 288)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        export_gguf(model, file, "llama", "f32", gguf_metadata(tokenizer, CONFIG.vocab_size))
        for part, rows in {"one": 1, "eight": 8}.items():
            if part in parts:
                print(json.dumps({part: measure(rows, model, file, 5)}), flush=True)
    if "ragged" in parts:
        print(json.dumps({"ragged": measure_ragged(model, 3)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or ["one", "eight", "ragged"])
