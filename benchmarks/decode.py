"""Decoding tokens/s: 12 layers, width 768, 12 heads, 4 kv heads, ffn 2048, vocabulary 32000, tied, float32, batch 1.

A prompt of 128 tokens and 128 new tokens, greedy, compared with the fastest of transformers' generate (dynamic cache,
static cache, static cache compiled).
"""

from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.timing import interleave
from regard.engine.engine import Engine
from regard.engine.request import Sampling
from regard.families import llama
from regard.models.decoder import Decoder

PROMPT, NEW = 128, 128
CONFIG = LlamaConfig(
    vocab_size=32000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
    num_key_value_heads=4, max_position_embeddings=1024, tie_word_embeddings=True, eos_token_id=None,
)  # fmt: skip


def build_regard(prompt: torch.Tensor) -> Callable[[], object]:
    spec: Decoder = llama.spec(CONFIG.to_dict())
    engine = Engine(spec.build(seed=0), rows=1, capacity=PROMPT + NEW, compile=True)
    sampling = Sampling(max_new=NEW, temperature=0)
    return lambda: engine.generate(prompt[0].tolist(), sampling)


def build_transformers(prompt: torch.Tensor, cache: str | None, compiled: bool) -> Callable[[], object]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).eval()
    if compiled:
        model.forward = torch.compile(model.forward)
    options = {} if cache is None else {"cache_implementation": cache}
    mask = torch.ones_like(prompt)

    @torch.inference_mode()
    def run() -> None:
        out = model.generate(
            prompt,
            attention_mask=mask,
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
            pad_token_id=0,
            **options,
        )
        assert out.shape[1] == PROMPT + NEW

    return run


def measure(rounds: int = 5) -> dict[str, object]:
    prompt = torch.randint(CONFIG.vocab_size, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    candidates = {
        "regard": build_regard(prompt),
        "transformers dynamic": build_transformers(prompt, None, compiled=False),
        "transformers static": build_transformers(prompt, "static", compiled=False),
        "transformers static compiled": build_transformers(prompt, "static", compiled=True),
    }
    rates = interleave(candidates, rounds, NEW)
    best = max(rate for name, rate in rates.items() if name != "regard")
    return {"decode_tokens_per_second": rates, "decode_ratio": round(rates["regard"] / best, 3)}
