"""Training tokens/s of SmolLM2-135M with LoRA on all linear layers, compared with PEFT on the model of transformers.

python -m benchmarks.tune [--rounds 5]

Rank 16, 8 rows of 128 tokens, float32, AdamW; once all tokens count, and once a third of them, the last of each row, as
in conversations with short answers. The steps are interleaved.
"""

import argparse
import json
import platform
from collections.abc import Callable

import peft
import torch
import transformers
from torch import Tensor

from benchmarks.timing import interleave
from regard.adapt import LoRA, add_lora
from regard.data.batch import Batch
from regard.find_model import locate
from regard.load_model import load
from regard.objectives.next_token import next_token
from regard.training.optimizer import AdamW
from regard.training.step import take_step

ROWS, LENGTH, RANK, ALPHA, LR = 8, 128, 16, 32, 1e-4


def build_regard_step(tokens: Tensor, weights: Tensor) -> Callable[[], object]:
    model = load("smollm2", "cpu").model.train()
    add_lora(model, LoRA(rank=RANK, alpha=ALPHA), seed=0)
    optimizer = AdamW(weight_decay=0.0).build(model, lr=LR)
    batch = Batch(
        tokens=tokens[:, :-1], targets=tokens[:, 1:], weights=weights,
        positions=torch.arange(LENGTH).expand(ROWS, LENGTH), segments=torch.zeros(ROWS, LENGTH, dtype=torch.long),
    )  # fmt: skip
    return lambda: take_step(model, next_token, batch, optimizer, clip=1.0)


def build_peft_step(tokens: Tensor, weights: Tensor) -> Callable[[], object]:
    file = locate("smollm2")
    base = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.0, fused=True)
    labels = tokens.clone()
    labels[:, 1:][weights == 0] = -100  # transformers shifts the labels

    def step() -> None:
        model(tokens, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tokens = torch.randint(49_000, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    result: dict[str, object] = {"machine": platform.machine(), "threads": torch.get_num_threads()}
    for name, first in {"all": 0, "answers": 2 * LENGTH // 3}.items():
        weights = (torch.arange(LENGTH) >= first).float().expand(ROWS, LENGTH)
        steps = {"regard": build_regard_step(tokens, weights), "peft": build_peft_step(tokens, weights)}
        rates = interleave(steps, rounds, ROWS * LENGTH)
        result[name] = rates | {"ratio": round(rates["regard"] / rates["peft"], 3)}
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
