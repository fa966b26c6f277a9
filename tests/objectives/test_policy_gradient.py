"""Identities of policy gradients; tests/objectives/test_policy_gradient_trl.py compares them with TRL."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import regard
from regard.data.batch import Batch
from regard.objectives.next_token import next_token
from regard.objectives.policy_gradient import GRPO, REINFORCE, RLOO
from regard.objectives.reinforcement import ROLLOUT_METRICS, Reinforcement, prompt_of, sampled_batch
from regard.objectives.sequence_logprobs import score_tokens, sum_sequences
from regard.text.train import byte

TOKENIZER = byte()
SEQUENCES = [([10, 11, 12], [20 + n, 30, 40][: 1 + n % 3]) for n in range(4)]
LAYER = regard.Block((regard.Sublayer(regard.Attention(2, position=regard.Rope())), regard.Sublayer(regard.SwiGLU(24))))
MODEL = regard.Decoder(TOKENIZER.vocab_size, 16, (regard.Repeat((LAYER,)),)).build(seed=0).double()
REWARDS = torch.tensor([[0.0, 1.0], [3.0, 1.0]], dtype=torch.float64)


def batch_of(objective: Reinforcement, rewards: Tensor) -> Batch:
    """Sampled by the model itself."""
    batch = sampled_batch(SEQUENCES, TOKENIZER)
    counted = (batch.weights > 0).double()
    with torch.no_grad():
        logprobs = score_tokens(MODEL, batch, objective.temperature)[0].logprobs
    fields = dict(batch) | {
        "weights": counted * objective.sequence_weights(counted.sum(1)).unsqueeze(1),
        "advantages": counted * objective.advantages(rewards).view(-1, 1),
        "rollout": torch.zeros(len(SEQUENCES), len(ROLLOUT_METRICS)),
    }
    return Batch(**fields, old_logprobs=logprobs)


def gradients(objective: Reinforcement, batch: Batch) -> dict[str, Tensor]:
    MODEL.zero_grad()
    loss, count, metrics = objective(MODEL, batch)
    (loss / count).backward()
    assert metrics.get("clip_fraction", 0) == 0
    return {name: p.grad.clone() for name, p in MODEL.named_parameters()}


def test_advantages_of_a_hand_computed_example() -> None:
    std = 2**0.5  # of 3 and 1; of 0 and 1 it is half
    assert torch.allclose(GRPO(group=2).advantages(REWARDS)[1], torch.tensor([1.0, -1.0]).double() / (std + 1e-4))
    assert GRPO(group=2, scale="none").advantages(REWARDS).tolist() == [[-0.5, 0.5], [1.0, -1.0]]
    assert RLOO(group=2).advantages(REWARDS).tolist() == [[-1.0, 1.0], [2.0, -2.0]]
    assert REINFORCE().advantages(REWARDS).tolist() == [[-1.25, -0.25], [1.75, -0.25]]
    assert torch.equal(REINFORCE(baseline="none").advantages(REWARDS), REWARDS)


@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo"])
def test_equal_rewards_give_no_gradient(loss: str) -> None:
    batch = batch_of(GRPO(group=2, loss=loss), torch.tensor([[0.7, 0.7], [0.1, 0.1]]).double())
    assert all(not gradient.any() for gradient in gradients(GRPO(group=2, loss=loss), batch).values())


def test_the_first_step_of_rloo_is_that_of_reinforce() -> None:
    """All ratios are 1, and their gradients those of the log-probabilities."""
    rloo, reinforce = RLOO(group=2), REINFORCE(baseline="none")
    first = batch_of(rloo, REWARDS)
    ratios = (score_tokens(MODEL, first)[0].logprobs - first.old_logprobs).exp()
    assert (ratios == 1).all()
    expected = gradients(reinforce, batch_of(reinforce, rloo.advantages(REWARDS)))
    for name, gradient in gradients(rloo, first).items():
        assert (gradient - expected[name]).abs().max() < 1e-12, name
    assert max(gradient.abs().max() for gradient in expected.values()) > 1e-3


@pytest.mark.ledger("lwr.info", exact=True)
def test_an_episode_teaches_one_bit_and_a_supervised_token_as_many_as_it_has_choices() -> None:
    """Given the samples, the update is a function of the rewards: 2 to the number of episodes, of any length."""
    reinforce = REINFORCE(baseline="none")
    rewards = torch.cartesian_prod(*[torch.tensor([0.0, 1.0]).double()] * len(SEQUENCES))
    updates = {digest(gradients(reinforce, batch_of(reinforce, row.view(2, 2)))) for row in rewards}
    assert math.log2(len(updates)) == len(SEQUENCES) < sum(len(sampled) for _, sampled in SEQUENCES)
    answers = torch.cartesian_prod(*[torch.arange(20, 24)] * 3).tolist()  # 3 tokens, each one of 4
    supervised = {digest(next_token_gradients(answer)) for answer in answers}
    assert math.log2(len(supervised)) == 3 * math.log2(4)


def next_token_gradients(answer: list[int]) -> dict[str, Tensor]:
    MODEL.zero_grad()
    next_token(MODEL, sampled_batch([([10, 11, 12], answer)], TOKENIZER))[0].backward()
    return {name: p.grad.clone() for name, p in MODEL.named_parameters()}


def digest(gradients: dict[str, Tensor]) -> tuple[float, ...]:
    """The first elements of every gradient: different gradients differ in one of them."""
    return tuple(round(gradient.flatten()[i].item(), 9) for gradient in gradients.values() for i in range(16))


def test_the_divergence_from_the_same_model_is_zero() -> None:
    objective = GRPO(group=2, kl=1.0)
    batch = batch_of(objective, REWARDS)
    same = Batch(**batch, reference_logprobs=batch.old_logprobs)
    assert objective(MODEL, same)[2]["kl"] == 0
    other = Batch(**batch, reference_logprobs=batch.old_logprobs - (batch.weights > 0) * 0.5)
    loss, _, metrics = objective(MODEL, other)
    expected = (torch.tensor(-0.5).exp() - 1 + 0.5) * (batch.weights > 0).sum()
    assert abs(metrics["kl"] - expected) < 1e-6 and loss > replace(objective, kl=0.0)(MODEL, other)[0]


def test_sums_over_sequences_are_spread_over_their_tokens() -> None:
    values, segments = torch.tensor([[1.0, 2.0, 4.0, 8.0]]), torch.tensor([[0, 0, 1, -1]])
    assert sum_sequences(values, segments)[0, :3].tolist() == [3.0, 3.0, 4.0]


def test_the_prompt_of_a_conversation_ends_before_the_answer() -> None:
    question, answer = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}
    assert prompt_of({"messages": [question, answer]}) == [question] == prompt_of({"messages": [question]})
    with pytest.raises(ValueError, match=r"needs examples with `prompt` or `messages`; this one has text"):
        prompt_of({"text": "a"})


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(regard.SpecError, match="group=1 must be at least 2"):
        GRPO(group=1)
    with pytest.raises(regard.SpecError, match="use rloo or grpo"):
        REINFORCE(epochs=2)
    with pytest.raises(regard.SpecError, match="its advantage is 0; raise data.rows"):
        REINFORCE().advantages(torch.ones(1, 1))
    with pytest.raises(regard.SpecError, match="max_kl=0.5 has no effect: .* set kl"):
        GRPO(max_kl=0.5)
    assert GRPO(max_kl=0.5, kl=0.1).max_kl == 0.5
