"""PPO: the worked example of the documentation, a plain loop in float64, and identities of advantages."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.data.batch import Batch
from regard.models.outputs import materialize
from regard.objectives.ppo import PPO, adapted_kl, explained_variance, generalized_advantages, token_rewards
from regard.objectives.reinforcement import sampled_batch
from regard.objectives.sequence_logprobs import TokenScores, score_tokens
from regard.text.train import byte

PAGE = Path(__file__).parents[2] / "docs/topics/reinforcement.md"
TOKENIZER = byte()
SEQUENCES = [([10, 11, 12][: 1 + n % 3], [20 + n, 30, 40, 50][: 1 + n]) for n in range(4)]
REWARDS = torch.tensor([0.0, 1.0, 3.0, -1.0], dtype=torch.float64)
LAYER = regard.Block((regard.Sublayer(regard.Attention(2, position=regard.Rope())), regard.Sublayer(regard.SwiGLU(24))))
SPEC = regard.Decoder(TOKENIZER.vocab_size, 16, (regard.Repeat((LAYER,)),), value_head=True)
OBJECTIVE = PPO(kl=0.3, lam=0.7, gamma=0.9, clip=0.1, value_clip=0.1, value_weight=0.6, temperature=0.8)
LIMIT = 1e-6


def model_of(seed: int) -> nn.Module:
    model = SPEC.build(seed=seed).double().eval()
    with torch.no_grad():
        model.get_parameter("value_head.weight").normal_(generator=torch.Generator().manual_seed(seed))
        model.get_parameter("value_head.bias").fill_(seed / 10)
    return model


def rows_of_page() -> dict[str, list[float]]:
    """The rows of the tables with one column per token."""
    number = r"(-?[\d.]+)"
    row = rf"^\| ([^|]+) \| {number} \| {number} \| {number} \| [^|]+ \|$"
    lines = re.findall(row, PAGE.read_text(), re.MULTILINE)
    return {name: [float(number) for number in numbers] for name, *numbers in lines}


@pytest.mark.ledger("rlhf.rl")
def test_the_worked_example_of_the_documentation() -> None:
    rows, text = rows_of_page(), " ".join(PAGE.read_text().split())
    columns = {name: torch.tensor([numbers], dtype=torch.float64) for name, numbers in rows.items()}
    old = {"old_logprobs": columns["log π_old"], "reference_logprobs": columns["log π_ref"]}
    sampled = Batch(weights=torch.ones(1, 3), **old, old_values=columns["value V"])
    objective = PPO(kl=0.1, lam=0.5, gamma=1.0, clip=0.2, value_clip=0.2, value_weight=0.1, normalize_advantages=False)
    rewards = torch.ones(1, dtype=torch.float64)
    received = token_rewards(sampled, rewards, 0.1)
    (fields,) = objective.token_fields([sampled], rewards, 0.1)
    (normalized,) = replace(objective, normalize_advantages=True).token_fields([sampled], rewards, 0.1)
    batch = Batch(**sampled, **fields)
    losses = []
    for weight in (1e-9, 1.0):  # a value loss needs a positive weight
        scores = TokenScores(columns["log π"], torch.zeros(1, 3), columns["value v"])
        losses.append(replace(objective, value_weight=weight).token_losses(scores, batch)[0])
    found = {
        "reward r": received,
        "TD error δ": replace(objective, lam=0.0).token_fields([sampled], rewards, 0.1)[0]["advantages"],
        "advantage A": fields["advantages"],
        "return G": fields["returns"],
        "normalized A": normalized["advantages"],
        "ratio ρ": (columns["log π"] - columns["log π_old"]).exp(),
        "policy loss": losses[0],
        "value loss": losses[1] - losses[0],
    }
    for name, numbers in found.items():
        assert [round(number, 4) for number in numbers[0].tolist()] == pytest.approx(rows[name], abs=1e-9), name
    loss = (losses[0] + 0.1 * (losses[1] - losses[0])).mean()
    assert f"value_weight · value loss: {loss:.4f}." in text
    variance = explained_variance(fields["returns"][0].double(), sampled.old_values[0])
    assert f"1 - Var(G - V) / Var(G), is {variance:.4f};" in text
    kl = replace(objective, target_kl=0.1, horizon=10).next_kl([sampled], 0.1)
    assert math.isclose(kl, 0.102) and "the next rollout has kl = 0.102" in text
    clipped = objective.token_losses(TokenScores(columns["log π"], torch.zeros(1, 3), columns["value v"]), batch)[1]
    assert clipped["clip_fraction"] == 1 and clipped["value_clip_fraction"] == 1


def rollout() -> list[Batch]:
    """Two batches, sampled by one model, with another as the reference."""
    halves = [sampled_batch(SEQUENCES[:2], TOKENIZER), sampled_batch(SEQUENCES[2:], TOKENIZER)]
    batches = []
    with torch.no_grad():
        for half in halves:
            ours, theirs = (score_tokens(model_of(seed), half, OBJECTIVE.temperature)[0] for seed in (1, 2))
            fields = {"old_logprobs": ours.logprobs, "reference_logprobs": theirs.logprobs}
            batches.append(Batch(**half, **fields, old_values=ours.values))
    return batches


def advantages_by_loop(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """A_t = Σ_k (γ λ)^k δ_{t+k}"""
    values = [*values, 0.0]
    deltas = [reward + gamma * values[t + 1] - values[t] for t, reward in enumerate(rewards)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]


class Token(NamedTuple):
    advantage: float
    value: float
    difference: float  # log π_old - log π_ref
    ratio: Tensor
    value_now: Tensor


def tokens_by_loop(model: nn.Module) -> list[Token]:
    """The tokens of all completions, one sequence at a time."""
    tokens = []
    for (prompt, completion), reward in zip(SEQUENCES, REWARDS.tolist(), strict=True):
        ids, steps = torch.tensor([[*prompt, *completion]]), range(len(prompt) - 1, len(prompt) + len(completion) - 1)
        with torch.no_grad():
            (old, old_values), (reference, _) = (logprobs_and_values(model_of(seed), ids) for seed in (1, 2))
        now, values_now = logprobs_and_values(model, ids)
        received = [-OBJECTIVE.kl * float(old[t] - reference[t]) for t in steps]
        received[-1] += reward
        values = [float(old_values[t]) for t in steps]
        advantages = advantages_by_loop(received, values, OBJECTIVE.gamma, OBJECTIVE.lam)
        tokens += [
            Token(advantage, value, float(old[t] - reference[t]), (now[t] - old[t]).exp(), values_now[t])
            for advantage, value, t in zip(advantages, values, steps, strict=True)
        ]
    return tokens


def logprobs_and_values(model: nn.Module, ids: Tensor) -> tuple[list[Tensor], Tensor]:
    """Of one sequence: log p of the token after each one, and the values."""
    outputs = model(ids, outputs=True)
    logprobs = (materialize(outputs.logits)[0] / OBJECTIVE.temperature).log_softmax(-1)
    return [logprobs[t, ids[0, t + 1]] for t in range(ids.shape[1] - 1)], outputs.values[0]


@pytest.mark.ledger("rlhf.rl")
def test_loss_gradients_and_metrics_equal_a_plain_loop() -> None:
    model, batches = model_of(0), rollout()
    finished = OBJECTIVE.token_fields(batches, REWARDS, OBJECTIVE.kl)
    batches = [Batch(**batch, **fields) for batch, fields in zip(batches, finished, strict=True)]
    measured = OBJECTIVE.measure(batches, OBJECTIVE.kl)

    tokens = tokens_by_loop(model)
    n, mean = len(tokens), sum(token.advantage for token in tokens) / len(tokens)
    std = math.sqrt(variance([token.advantage for token in tokens]))
    policy, value, clips, value_clips = torch.zeros(()), torch.zeros(()), 0, 0
    for token in tokens:
        advantage, ratio = (token.advantage - mean) / std, token.ratio
        policy = policy - min(ratio * advantage, ratio.clamp(0.9, 1.1) * advantage)
        clips += int(ratio > 1.1 if advantage > 0 else ratio < 0.9)
        near = token.value_now.clamp(token.value - 0.1, token.value + 0.1)
        error, near_error = ((v - token.advantage - token.value) ** 2 for v in (token.value_now, near))
        value, value_clips = value + max(error, near_error) / 2, value_clips + int(near_error > error)
    expected = policy + OBJECTIVE.value_weight * value
    expected_gradients = torch.autograd.grad(expected, list(model.parameters()))

    results = [OBJECTIVE(model, Batch(**batch, rollout=torch.zeros(2, len(PPO.rollout_metrics)))) for batch in batches]
    loss = sum(result[0] for result in results)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    assert sum(result[1] for result in results) == n == 10
    assert abs(loss - expected) < LIMIT * n
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        assert (ours - theirs).abs().max() < LIMIT * max(1, theirs.abs().max())
    sums = {"value_loss": value, "clip_fraction": clips, "value_clip_fraction": value_clips}
    sums["kl"] = sum(token.difference for token in tokens)
    for name, total in sums.items():
        assert abs(sum(result[2][name] for result in results) - total) < LIMIT * n, name
    assert 0 < clips < n and 0 < value_clips < n
    rest, returns = [t.advantage for t in tokens], [t.advantage + t.value for t in tokens]
    assert measured == pytest.approx([OBJECTIVE.kl, 1 - variance(rest) / variance(returns)], abs=LIMIT)


def variance(numbers: list[float]) -> float:
    mean = sum(numbers) / len(numbers)
    return sum((number - mean) ** 2 for number in numbers) / len(numbers)


def test_advantages_with_lambda_0_are_td_errors_and_with_lambda_1_returns_minus_values() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(3, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    counted = torch.tensor([[0, 1, 1, 1, 1, 0], [0, 0, 0, 1, 0, 0], [1, 1, 1, 1, 1, 1]]).bool()
    gamma = 0.9
    errors, full = (generalized_advantages(rewards, values, counted, gamma, lam) for lam in (0.0, 1.0))
    for row in range(3):
        places = counted[row].nonzero().flatten().tolist()
        for n, t in enumerate(places):
            following = values[row, places[n + 1]] if n + 1 < len(places) else 0.0
            assert errors[row, t] == rewards[row, t] + gamma * following - values[row, t]
            total = sum(gamma**k * rewards[row, later] for k, later in enumerate(places[n:]))
            assert abs(full[row, t] - (total - values[row, t])) < 1e-12
    assert not errors[~counted].any() and not full[~counted].any()


def test_the_first_step_has_ratios_of_one_and_the_values_of_the_rollout() -> None:
    batches = rollout()
    fields = OBJECTIVE.token_fields(batches, REWARDS, OBJECTIVE.kl)
    batch = Batch(**batches[1], **fields[1], rollout=torch.zeros(2, len(PPO.rollout_metrics)))
    scores = score_tokens(model_of(1), batch, OBJECTIVE.temperature)[0]
    assert torch.equal(scores.logprobs, batch.old_logprobs) and torch.equal(scores.values, batch.old_values)
    loss, _, metrics = OBJECTIVE(model_of(1), batch)
    assert metrics["clip_fraction"] == metrics["value_clip_fraction"] == 0
    errors = 0.5 * (batch.old_values - batch.returns)[batch.weights > 0].square().sum()
    assert abs(loss - (-batch.advantages.sum() + OBJECTIVE.value_weight * errors)) < LIMIT


def test_the_adapted_coefficient_follows_the_target() -> None:
    assert adapted_kl(0.1, 0.05, 0.1, 0.5) == pytest.approx(0.09)  # at most -0.2
    assert adapted_kl(0.1, 0.11, 0.1, 0.5) == pytest.approx(0.105)
    assert adapted_kl(0.1, 9.0, 0.1, 50.0) == pytest.approx(0.12)  # a rollout of more than `horizon` completions
    assert PPO().next_kl([], 0.3) == 0.3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lam": 1.5}, r"lam=1.5 must be in \[0, 1\]"),
        ({"value_clip": 0.0}, "value_clip=0.0 must be positive"),
        ({"target_kl": 0.1, "kl": 0.0}, "target_kl=0.1 adapts kl=0.0; both must be positive"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict, message: str) -> None:
    with pytest.raises(regard.SpecError, match=message):
        PPO(**options)
