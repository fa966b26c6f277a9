"""In policy-gradient RL, LoRA of rank 1 learns as much as full fine-tuning, with a wider band of good learning rates.

A prompt has four random symbols and an instruction, which means the first, second, third or fourth of them. The base
model was trained on answers of which one in five is the symbol that is meant, and the others are any of the four, so it
is right in 40 % of its answers. A sampled answer is an episode, and its reward is 1 for the right symbol, else 0.
Copies of the base model are tuned by GRPO, all weights (FullFT) or adapters of rank 1 in all linear layers, at
learning rates from 10⁻⁴ to 10⁻¹, with Adam at a constant rate and on the same prompts. The reward at the end is that of
sampled answers to new prompts. A rate is good if its reward is at least 90 % of the best reward of FullFT.
"""

# ledger: lwr.rl

import math
from copy import deepcopy

import torch
from torch import Tensor

from regard.adapt.adapters import add_lora
from regard.adapt.lora import LoRA
from regard.data.batch import Batch
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import fit, generator
from regard.labs.small_models import small_decoder
from regard.labs.tasks import FIRST, draw_symbols, whole_rows
from regard.models.decoder import DecoderModule
from regard.objectives.policy_gradient import GRPO
from regard.objectives.reinforcement import ROLLOUT_METRICS
from regard.training.faults import NonFinite
from regard.training.step import take_step

SYMBOLS, POSITIONS, WIDTH = 16, 4, 64
INSTRUCTION = FIRST + SYMBOLS  # the id of the first of POSITIONS instructions
PROMPTS, GROUP, TESTED = 16, 8, 1024
RATES = tuple(10 ** (exponent / 3) for exponent in range(-12, -2))
METHODS = {"FullFT": None, "LoRA rank 1": LoRA(rank=1)}
FOLLOWED = 0.2  # the share of answers that follow the instruction in the data of the base model
GOOD = 0.9


def draw_prompts(rng: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
    """Prompts (rows, positions + 1) and the symbols that their instructions mean (rows,)."""
    symbols = draw_symbols(rng, SYMBOLS, rows, POSITIONS)
    asked = torch.randint(POSITIONS, (rows, 1), generator=rng)
    return torch.cat([symbols, INSTRUCTION + asked], 1), symbols.gather(1, asked)[:, 0]


def answered(prompts: Tensor, answers: Tensor) -> Batch:
    """A batch in which only the answer, the token after the instruction, counts."""
    weights = torch.zeros(prompts.shape)
    weights[:, -1] = 1
    return whole_rows(prompts, torch.cat([prompts[:, 1:], answers[:, None]], 1), weights)


def careless_answers(rng: torch.Generator, rows: int = 64) -> Batch:
    """Prompts whose answer follows the instruction in one case of five, and else is any of their symbols."""
    prompts, meant = draw_prompts(rng, rows)
    chosen = prompts.gather(1, torch.randint(POSITIONS, (rows, 1), generator=rng))[:, 0]
    follows = torch.rand(rows, generator=rng) < FOLLOWED
    return answered(prompts, torch.where(follows, meant, chosen))


@torch.no_grad()
def sample_answers(
    model: DecoderModule, prompts: Tensor, rng: torch.Generator, count: int = 1
) -> tuple[Tensor, Tensor]:
    """Answers and their log-probabilities, both (rows, count)."""
    logprobs = model.eval()(prompts)[:, -1].float().log_softmax(-1)
    answers = torch.multinomial(logprobs.exp(), count, replacement=True, generator=rng)
    return answers, logprobs.gather(1, answers)


def roll_out(model: DecoderModule, objective: GRPO, rng: torch.Generator) -> Batch:
    prompts, meant = draw_prompts(rng, PROMPTS)
    answers, logprobs = sample_answers(model, prompts, rng, objective.group)  # (prompts, group)
    batch = answered(prompts.repeat_interleave(objective.group, 0), answers.flatten())
    advantages = objective.advantages((answers == meant[:, None]).double())
    fields = {
        "old_logprobs": batch.weights * logprobs.view(-1, 1),
        "advantages": batch.weights * advantages.float().view(-1, 1),
        "rollout": torch.zeros(batch.size, len(ROLLOUT_METRICS)),
    }
    return Batch(**batch, **fields)


def tune(bench: Bench, base: DecoderModule, lora: LoRA | None, rate: float) -> float:
    """The reward of sampled answers to new prompts after tuning; 0 if it diverged."""
    model, rng = deepcopy(base), generator(bench.seed + 1)
    if lora is not None:
        add_lora(model, lora, bench.seed)
    objective = GRPO(group=GROUP, max_new=1)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], rate)
    for _ in range(bench.training(200, 2)):
        batch = roll_out(model, objective, rng)
        model.train()
        try:
            take_step(model, objective, batch, optimizer, clip=1.0)
        except NonFinite:
            return 0.0
    return test_reward(bench, model)


def test_reward(bench: Bench, model: DecoderModule) -> float:
    rng = generator(bench.seed + 2)
    prompts, meant = draw_prompts(rng, TESTED)
    return (sample_answers(model, prompts, rng)[0][:, 0] == meant).float().mean().item()


def band(rewards: list[float], threshold: float) -> float:
    """The width of the range of rates with at least this reward, in powers of ten: of the longest run of them."""
    longest = current = 0
    for reward in rewards:
        current = current + 1 if reward >= threshold else 0
        longest = max(longest, current)
    return longest * math.log10(RATES[1] / RATES[0])


def run(bench: Bench) -> Findings:
    torch.manual_seed(bench.seed)
    base = small_decoder("attention", INSTRUCTION + POSITIONS, WIDTH)
    fit(bench, "base model", base, careless_answers, bench.setting(600, 2))
    start = test_reward(bench, base)
    rates = bench.setting(RATES, RATES[:2])
    runs = [(name, rate) for name in METHODS for rate in rates]
    rewards: dict[str, list[float]] = {name: [] for name in METHODS}
    for name, rate in bench.each("policy gradient", runs):
        rewards[name].append(tune(bench, base, METHODS[name], rate))
        bench.show(f"{name}, rate {rate:.0e}: reward {rewards[name][-1]:.2f}")
    best = {name: max(found) for name, found in rewards.items()}
    best_rate = {name: rates[found.index(best[name])] for name, found in rewards.items()}
    bands = {name: band(found, GOOD * best["FullFT"]) for name, found in rewards.items()}
    one, full = "LoRA rank 1", "FullFT"
    checks = [
        Check("FullFT learns: its best reward is above 0.8", f"{best[full]:.2f}, at first {start:.2f}",
              best[full] > 0.8),
        Check("the best reward of rank 1 is at most 0.05 below that of FullFT", f"{best[one]:.3f} and {best[full]:.3f}",
              best[one] >= best[full] - 0.05),
        Check("the band of good rates is wider for rank 1 than for FullFT, in powers of ten",
              f"{bands[one]:.1f} and {bands[full]:.1f}", bands[one] > bands[full]),
        Check("the best rate of rank 1 is above that of FullFT", f"{best_rate[one]:.0e} and {best_rate[full]:.0e}",
              best_rate[one] > best_rate[full]),
    ]  # fmt: skip
    table = [
        {"tuned": name, "weights": trained_weights(base, lora), "best reward": best[name],
         "best rate": best_rate[name], "good rates, powers of ten": bands[name]}
        for name, lora in METHODS.items()
    ]  # fmt: skip
    lines = {name: list(zip(rates, found, strict=True)) for name, found in rewards.items()}
    plot = Plot("learning rate", "reward at the end", lines, log="x")
    remark = f"Guessing a symbol of the prompt: {1 / POSITIONS}. Adjacent rates differ by a factor of 2.2."
    return Findings(table, checks, [plot], remark)


def trained_weights(base: DecoderModule, lora: LoRA | None) -> int:
    model = deepcopy(base)
    if lora is not None:
        add_lora(model, lora, 0)
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
