"""One step of GRPO on one GPU: `python -m benchmarks.gpu.grpo [--profile]`.

The shape of Qwen3 0.6B with float32 weights, 64 prompts of 128 tokens, 8 completions of 256 tokens each, in the loader,
the engine and the step of `regard tune grpo --full`. Prints the seconds of generation, of the gradient step and of the
rest (rewards, log-probabilities, batches), and the tokens/s of generation beside those of `generate` in transformers
with bfloat16 weights, with which TRL samples; both in turns. On a CPU the sizes are tiny, to try the script.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.gpu.engine import GPU
from regard.models.decoder import Decoder, DecoderModule
from regard.models.stack import Repeat
from regard.objectives.policy_gradient import GRPO
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.norm import RMSNorm
from regard.parts.position.rope import Rope
from regard.reinforcement_run import EngineGenerator
from regard.training.optimizer import AdamW
from regard.training.rollouts import RolloutLoader, SampledCompletion, Scorer
from regard.training.step import autocast, compile_model, take_step

DEVICE = torch.device("cuda" if GPU else "cpu")
PROMPTS, GROUP, PROMPT, NEW, MICRO_BATCHES = (64, 8, 128, 256, 16) if GPU else (2, 2, 8, 8, 2)
VOCAB, WIDTH, HIDDEN, LAYERS, HEADS, KV_HEADS = (151936, 1024, 3072, 28, 16, 8) if GPU else (256, 64, 128, 2, 2, 1)
TOKENS = PROMPTS * GROUP * NEW


class Numbers:
    """A tokenizer whose text are the ids themselves."""

    stop_ids, prefix_ids, pad = (), (), 0

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


class RandomPrompts:
    name, fingerprint, count = "random prompts", "", None

    def example(self, index: int) -> dict[str, str]:
        ids = torch.randint(VOCAB, (PROMPT,), generator=torch.Generator().manual_seed(index))
        return {"prompt": Numbers().decode(ids.tolist())}


def share_of_even_ids(examples: Sequence[dict], completions: Sequence[str]) -> list[float]:
    return [sum(word[-1] in "02468" for word in text.split()) / NEW for text in completions]


class Timed:
    """A function, and the seconds of its calls."""

    def __init__(self, function: Callable[..., Any]):
        self.function, self.seconds = function, list[float]()

    def __call__(self, *arguments: Any) -> Any:
        synchronize()
        start = time.perf_counter()
        result = self.function(*arguments)
        synchronize()
        self.seconds.append(time.perf_counter() - start)
        return result


def synchronize() -> None:
    if GPU:
        torch.cuda.synchronize()


def build() -> DecoderModule:
    attention = Attention(HEADS, kv_heads=KV_HEADS, head_dim=128, position=Rope(1e6), qk_norm=RMSNorm())
    block = Block((Sublayer(attention), Sublayer(SwiGLU(HIDDEN))))
    with DEVICE:
        return Decoder(VOCAB, WIDTH, (Repeat((block,), LAYERS),), tied=True).build(seed=0)


def transformers_generate() -> Callable[[], Any]:
    """`generate` of the same shape and prompts."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=HIDDEN, num_hidden_layers=LAYERS, head_dim=128,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, tie_word_embeddings=True, eos_token_id=None,
        bos_token_id=None,
    )  # fmt: skip
    with DEVICE:
        model = Qwen3ForCausalLM(config).eval().to(torch.bfloat16 if GPU else torch.float32)
    ids = torch.randint(VOCAB, (PROMPTS, PROMPT), device=DEVICE).repeat_interleave(GROUP, 0)

    def generate() -> Any:
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=NEW, pad_token_id=0,
        )  # fmt: skip

    return generate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=3, help="measured, after one to warm up")
    parser.add_argument("--no-peer", action="store_true", help="without transformers")
    parser.add_argument("--profile", action="store_true", help="also list what takes the most time in a generation")
    arguments = parser.parse_args()

    model: Any = build()
    rows, tokenizer, precision = PROMPTS * GROUP, Numbers(), autocast("auto", DEVICE)
    objective = GRPO(group=GROUP, max_new=NEW)
    optimizer, compiled = AdamW().build(model, lr=1e-6), compile_model(model, DEVICE, print) if GPU else model
    generate: Any = EngineGenerator(model, tokenizer, PROMPT + NEW, NEW, rows, torch.bfloat16 if GPU else None)  # ty: ignore[invalid-argument-type]
    generate = Timed(generate)
    loader = RolloutLoader(
        RandomPrompts(), objective, tokenizer, rows, PROMPT + NEW, generate,  # ty: ignore[invalid-argument-type]
        share_of_even_ids, Scorer(compiled, precision, MICRO_BATCHES),
    )  # fmt: skip
    step = Timed(
        lambda batch: take_step(compiled, objective, batch.to(DEVICE), optimizer, 1.0, MICRO_BATCHES, precision)
    )
    rollout = Timed(lambda: next(loader))
    peer = None if arguments.no_peer else Timed(transformers_generate())
    for number in range(arguments.rollouts + 1):
        metrics = step(rollout())
        if peer is not None:
            peer()
        print(f"rollout {number}: generation {generate.seconds[-1]:.2f} s, rollout {rollout.seconds[-1]:.2f} s, "
              f"step {step.seconds[-1]:.2f} s, engine gap {metrics['engine_gap']:.2g} mean, "
              f"{metrics['largest_engine_gap']:.2g} largest, loss {metrics['loss']:.3g}", flush=True)  # fmt: skip
    generation, whole, update = (statistics.median(timed.seconds[1:]) for timed in (generate, rollout, step))
    rest = whole - generation
    print(f"{rows} completions of {NEW} tokens after {PROMPT}")
    print(f"generation {generation:6.2f} s   {TOKENS / generation:10,.0f} tokens/s")
    print(f"step       {update:6.2f} s")
    print(f"rest       {rest:6.2f} s   {rest / (whole + update):.1%} of {whole + update:.2f} s")
    if peer is not None:
        seconds = statistics.median(peer.seconds[1:])
        print(f"generate of transformers {seconds:.2f} s   {TOKENS / seconds:,.0f} tokens/s; "
              f"ours {seconds / generation:.2f} times as fast")  # fmt: skip
    if arguments.profile:
        profile(generate.function)


def profile(generate: Callable[..., list[SampledCompletion]]) -> None:
    """One more generation under profilers: of kernels, and of functions on the host."""
    import cProfile
    import pstats

    prompts = [RandomPrompts().example(index // GROUP) for index in range(PROMPTS * GROUP)]
    arguments = [Numbers().encode(prompt["prompt"]) for prompt in prompts], list(range(len(prompts))), 1.0
    if GPU:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            generate(*arguments)
        print(profiler.key_averages().table(sort_by="self_device_time_total", row_limit=20, max_name_column_width=60))
    with cProfile.Profile() as functions:
        generate(*arguments)
    pstats.Stats(functions).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
