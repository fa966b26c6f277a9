"""llama.cpp runs our GGUF files with the same log-probabilities, and its tokenizer encodes the same ids."""

import json
import urllib.request
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.checkpoint import load
from regard.checkpoint.gguf import export_gguf
from regard.engine.engine import Engine
from regard.engine.request import Sampling
from regard.find_model import locate
from regard.text.tokenizer import Tokenizer
from regard.text.train import bpe
from regard.text.write_gguf import gguf_metadata
from tests.checkpoint.gguf.tiny_models import MODELS, WIDE, build_tiny
from tests.text.sample_texts import MIXED
from tests.text.test_gguf import TOKENIZERS, write_gguf

xllamacpp = pytest.importorskip("xllamacpp", reason="xllamacpp, the binding of llama.cpp, is not installed")
pytestmark = pytest.mark.slow


def serve(file: Path) -> Any:
    settings = xllamacpp.CommonParams()
    settings.model.path = str(file)
    settings.n_ctx, settings.n_parallel, settings.n_gpu_layers, settings.warmup = 128, 1, 0, False
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return xllamacpp.Server(settings)


def logprobs(server: Any, ids: list[int], forced: int) -> dict[int, float]:
    """The log-probability of every next token.

    `forced` is sampled; it must be a complete character, because the server returns nothing for a partial one.
    """
    body = {"prompt": ids, "n_predict": 1, "temperature": 0, "n_probs": 1000, "cache_prompt": False}
    response = server.handle_completions(body | {"logit_bias": [[forced, 1000.0]]})
    (first,) = response["choices"][0]["logprobs"]["content"]
    return {entry["id"]: entry["logprob"] for entry in first["top_logprobs"]}


QUANTIZED = ("q8_0", "q6_k", "q5_k_m", "q5_1", "q5_0", "q4_k_m", "q4_1", "q4_0", "iq4_nl", "iq4_xs", "q3_k_m", "q2_k")


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "format"),
    [
        *((name, "f32") for name in MODELS),
        *product(["llama", "gpt2"], ["f16", "bf16", "q8_0", "q4_k_m"]),
        *product(["wide"], QUANTIZED),
    ],
)
def test_logprobs_equal_those_of_llama_cpp(name: str, format: str, tmp_path: Path) -> None:
    tokenizer = bpe(["a text of some words, some of them again"], 288)
    config = (MODELS | {"wide": WIDE})[name]
    model = build_tiny(config | {"vocab_size": tokenizer.vocab_size})
    file = tmp_path / "model.gguf"
    export_gguf(model, file, config["model_type"], format, gguf_metadata(tokenizer, tokenizer.vocab_size))
    server, ours = serve(file), load(file)
    generator = torch.Generator().manual_seed(0)
    for length in (1, 2, 5, 17, 40):
        ids = torch.randint(5, tokenizer.vocab_size, (length,), generator=generator)
        theirs = logprobs(server, ids.tolist(), tokenizer.encode("a")[0])
        found = ours(ids[None])[0, -1].log_softmax(-1)
        largest_error = max(abs(theirs[id] - found[id].item()) for id in theirs)
        # llama.cpp computes GELU with a float16 table, and with all but f32 it also rounds the activations
        limit = {"f32": 5e-3 if "gpt2" in name else 5e-5, "f16": 2e-2, "bf16": 0.2}.get(format, 0.6)
        assert len(theirs) > 200 and largest_error < limit


def test_packed_blocks_of_a_published_model_give_the_logprobs_of_llama_cpp(tmp_path: Path) -> None:
    """SmolLM2 in q4_k_m: Q5_0, Q8_0, Q4_K and Q6_K.

    Log-probabilities are compared, not tokens: llama.cpp rounds the activations, by which the likeliest of two close
    tokens differs even between its own batched and single-token steps.
    """
    file, tokenizer = tmp_path / "model.gguf", Tokenizer.load("smollm2")
    export_gguf(load("smollm2"), file, "llama", "q4_k_m", gguf_metadata(tokenizer, 49152))
    ids = tokenizer.encode("The capital of France is Paris. The sea is")
    server, engine, errors = serve(file), Engine(load(file, packed=True), rows=1, capacity=64), []  # ty: ignore
    for token in engine.generate(list(ids), Sampling(max_new=16, temperature=0, top_logprobs=20)):
        theirs = logprobs(server, ids, token.id)
        errors += [abs(theirs[id] - logprob) for id, logprob in token.top_logprobs]
        ids.append(token.id)
    assert len(errors) == 16 * 20 and sum(errors) / len(errors) < 0.2 and max(errors) < 1.2


@pytest.mark.parametrize("name", ["smollm2", *TOKENIZERS])
def test_ids_equal_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    file = write_gguf(TOKENIZERS[name](), tmp_path) if name in TOKENIZERS else locate(name)
    server, ours = serve(file), Tokenizer.load(file)
    for text in MIXED:
        for special in (True, False):
            body = json.dumps({"content": text, "add_special": False, "parse_special": special}).encode()
            request = urllib.request.Request(f"{server.listening_address}/tokenize", body)
            with urllib.request.urlopen(request) as response:
                assert json.loads(response.read())["tokens"] == ours.encode(text, special), text
