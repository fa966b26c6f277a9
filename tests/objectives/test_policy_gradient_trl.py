"""One step of GRPO and RLOO equals TRL: advantages, loss, gradients of all weights, and metrics.

The models are a tiny random GPT-2 of `transformers` and ours with the same weights; the model that sampled and the
reference have other weights, so no ratio is 1. TRL's own kernel computes log-probabilities in float32; here they come
from the logits in float64.
"""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from regard.checkpoint import load
from regard.data.batch import Batch
from regard.families import family
from regard.objectives.policy_gradient import GRPO, RLOO, ClippedPolicy
from regard.objectives.reinforcement import ROLLOUT_METRICS, Reinforcement, sampled_batch
from regard.objectives.sequence_logprobs import score_tokens
from regard.text.train import character
from tests.families.pairs import make_pair

pytestmark = pytest.mark.slow  # importing TRL takes seconds
GPT2 = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.2}
TOKENIZER = character(["the quick brown fox jumps over the lazy dog."])
PROMPTS, GROUP = ["the fox", "a dog"], 4
LENGTHS = (3, 7, 1, 5, 4, 2, 6, 3)
REWARDS = [0.0, 1.0, 0.5, 1.0, 2.0, 0.0, 0.25, 0.0]
LIMIT = 1e-6
KL, MAX_NEW = 0.3, 9


def sequences() -> list[tuple[list[int], list[int]]]:
    generator = torch.Generator().manual_seed(3)
    prompts = [TOKENIZER.encode(prompt) for prompt in PROMPTS for _ in range(GROUP)]
    completions = [torch.randint(5, TOKENIZER.vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]
    return list(zip(prompts, completions, strict=True))


def perturbed(model: nn.Module, seed: int) -> nn.Module:
    generator, model = torch.Generator().manual_seed(seed), deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def logprobs_from_logits(temperature: float) -> Any:
    """In place of TRL's method, in float64."""

    def logprobs(model: Any, ids: Tensor, mask: Tensor, keep: int, *args: Any, **options: Any) -> Any:
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        logits = model(ids, attention_mask=mask, position_ids=positions).logits[:, :-1] / temperature
        log_p = logits.log_softmax(-1)
        chosen = log_p.gather(-1, ids[:, 1:, None]).squeeze(-1)
        return chosen[:, -keep:], -(log_p.exp() * log_p).sum(-1)[:, -keep:].detach(), None

    return logprobs


def build_trainer(name: str, objective: ClippedPolicy, theirs: Any, folder: Path, **settings: Any) -> Any:
    import trl
    from datasets import Dataset

    TOKENIZER.save(folder / "tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer", pad_token="<|pad|>")
    arguments = getattr(trl, f"{name}Config")(
        str(folder / "trl"), report_to=[], use_cpu=True, bf16=False, disable_tqdm=True, num_generations=GROUP,
        per_device_train_batch_size=len(LENGTHS), num_iterations=2, beta=objective.kl,
        max_completion_length=MAX_NEW, temperature=objective.temperature, epsilon=objective.clip,
        epsilon_high=objective.clip_high, gradient_checkpointing=False, **settings,
    )  # fmt: skip
    rows = [{"prompt": prompt} for prompt in PROMPTS]
    trainer = getattr(trl, f"{name}Trainer")(
        theirs, lambda completions, **columns: REWARDS, arguments,
        train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
    )  # fmt: skip
    prompts, completions = map(list, zip(*sequences(), strict=True))
    texts = [TOKENIZER.decode(ids) for ids in completions]
    generated = {
        "GRPO": (prompts, completions, None, texts, None, {}, None, None),
        "RLOO": (prompts, completions, texts),
    }
    trainer._generate = lambda _: generated[name]
    trainer._get_per_token_logps_and_entropies = logprobs_from_logits(objective.temperature)
    return trainer


def our_batch(objective: Reinforcement, old: nn.Module, reference: nn.Module) -> Batch:
    """As a rollout makes it, but with given completions and models."""
    batch = sampled_batch(sequences(), TOKENIZER)
    counted = (batch.weights > 0).double()
    with torch.no_grad():
        old_logprobs, reference_logprobs = (
            score_tokens(model, batch, objective.temperature)[0].logprobs for model in (old, reference)
        )
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    if objective.kl and objective.kl_in_reward:
        rewards = rewards - objective.kl * (old_logprobs - reference_logprobs).sum(1)
    advantages = objective.advantages(rewards.view(-1, objective.group)).flatten()
    weights = objective.sequence_weights(counted.sum(1))
    fields = dict(batch) | {
        "weights": counted * weights.unsqueeze(1),
        "advantages": counted * advantages.unsqueeze(1),
        "old_logprobs": old_logprobs,
        "rollout": torch.zeros(len(LENGTHS), len(ROLLOUT_METRICS)),
    }
    return Batch(**fields, **({"reference_logprobs": reference_logprobs} if objective.kl else {}))


def models(folder: Path) -> tuple[Any, Any]:
    pair = make_pair(("GPT2LMHeadModel", GPT2 | {"vocab_size": TOKENIZER.vocab_size}), folder)
    return transformers.GPT2LMHeadModel.from_pretrained(folder).double().eval(), pair.ours.double().eval()


SETTINGS = {"max_new": MAX_NEW, "group": GROUP, "kl": KL, "clip": 0.1, "clip_high": 0.2}
CASES = {
    "grpo": (GRPO(**SETTINGS), {"loss_type": "grpo"}),
    "bnpo, biased kl": (
        GRPO(loss="dapo", unbiased_kl=False, **SETTINGS),
        {"loss_type": "bnpo", "use_bias_correction_kl": False},
    ),
    "dapo": (GRPO(loss="dapo", scale="batch", **SETTINGS), {"loss_type": "dapo", "scale_rewards": "batch"}),
    "dr_grpo": (GRPO(loss="dr_grpo", scale="none", **SETTINGS), {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    "gspo": (
        GRPO(ratio="sequence", **SETTINGS),
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    ),
    "without kl, temperature": (GRPO(**SETTINGS | {"kl": 0.0, "temperature": 0.7}), {"loss_type": "grpo"}),
    "rloo": (RLOO(**SETTINGS), {}),
    "rloo normalized": (RLOO(normalize_advantages=True, **SETTINGS | {"kl": 0.0}), {"normalize_advantages": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_one_step_equals_trl(case: str, tmp_path: Path) -> None:
    objective, settings = CASES[case]
    name = type(objective).__name__
    theirs, ours = models(tmp_path / "model")
    current, their_reference = perturbed(theirs, 1), perturbed(theirs, 2)
    current.save_pretrained(tmp_path / "current")
    their_reference.save_pretrained(tmp_path / "reference")
    trainer = build_trainer(name, objective, theirs, tmp_path, **settings)
    if objective.kl:
        trainer.ref_model = their_reference
    inputs = trainer._generate_and_score_completions([{"prompt": p} for p in PROMPTS for _ in range(GROUP)])
    trainer.model = current  # in eval mode, so metrics are those of an evaluation
    trainer.current_gradient_accumulation_steps = 1
    expected = trainer._compute_loss(current, inputs)
    expected.backward()

    reference = load(tmp_path / "reference", dtype=torch.float64).eval()
    policy = load(tmp_path / "current", dtype=torch.float64).eval()
    batch = our_batch(objective, ours, reference)
    first = batch.advantages.gather(1, (batch.weights > 0).int().argmax(1, keepdim=True)).squeeze(1)
    assert (first - inputs["advantages"]).abs().max() <= 1e-5  # TRL keeps rewards in float32
    loss, count, metrics = objective(policy, batch)
    (loss / count).backward()
    assert abs(loss / count - expected) <= LIMIT
    gradients = dict(family("gpt2").table(policy.spec).write({name: p.grad for name, p in policy.named_parameters()}))
    largest = max(p.grad.abs().max() for p in current.parameters())
    assert largest > 1e-2
    for key, parameter in current.named_parameters():
        assert (gradients[key] - parameter.grad).abs().max() <= LIMIT * max(1.0, largest), key
    logged = {key: values[-1] for key, values in trainer._metrics["eval"].items()}
    names = {"entropy": "entropy", "clip_ratio/region_mean": "clip_fraction", **({"kl": "kl"} if objective.kl else {})}
    for key, metric in names.items():
        assert abs(metrics[metric] / count - logged[key]) <= LIMIT, key
    assert logged["clip_ratio/region_mean"] > 0
