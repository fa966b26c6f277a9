"""Rewards: built-in ones, functions of the user with their errors, and reward models."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.objectives.policy_gradient import GRPO
from regard.objectives.reward import sequence_ids
from regard.training.rewards import RewardFunction, RewardModel, exact_match, json_object, load_reward, with_reward_path
from tests.training.tiny import TOKENIZER


def test_built_in_rewards() -> None:
    chat = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "yes"}]
    examples = [{"prompt": "a", "answer": "yes"}, {"prompt": "a", "completion": " yes"}, {"messages": chat}]
    assert exact_match(examples, [" yes", "no", "yes "]) == [1.0, 0.0, 1.0]
    target = {"prompt": "a", "answer": '{"who": "Mia"}'}
    texts = ['{"who": "Tom"}', '{"what": 1}', "[1]", "who"]
    assert json_object([target] * 4, texts) == [1.0, 0.0, 0.0, 0.0]
    assert json_object([{"prompt": "a"}] * 4, texts) == [1.0, 1.0, 0.0, 0.0]  # without a target, any object
    with pytest.raises(ValueError, match="this example has prompt"):
        exact_match([{"prompt": "a"}], ["b"])


def test_a_reward_function_gets_prompts_completions_and_columns_as_lists() -> None:
    def reward(prompts: Any, completions: Any, weight: Any) -> list[float]:
        assert prompts == ["a", [{"role": "user", "content": "b"}]]
        assert completions == [" x", [{"role": "assistant", "content": "y"}]]
        return weight

    examples = [{"prompt": "a", "weight": 2}, {"prompt": [{"role": "user", "content": "b"}], "weight": 3}]
    assert RewardFunction("mine:reward", reward)(examples, [" x", " y"]) == [2.0, 3.0]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0, 2.0], "mine:f returned 2 rewards for 1 completions; return one for each"),
        ([float("nan")], "mine:f returned nan for 'x'; return a finite number"),
        ([1e300], "mine:f returned 1e.300 for 'x'; return a finite number up to 1e.15"),
        ([10**400], "mine:f must return a list of numbers"),
        ("1", "mine:f must return a list of numbers, not '1'"),
        ({0: 0.5}, "mine:f must return a list of numbers, not {0: 0.5}"),
        (iter([lambda: 0]), "mine:f must return a list of numbers"),
        (None, "mine:f must return a list of numbers, not None"),
    ],
)
def test_wrong_results_of_a_reward_function_are_refused(result: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RewardFunction("mine:f", lambda **_: result)([{"prompt": "a"}], ["x"])


def test_errors_of_rewards_name_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrong_syntax.py").write_text("def f(:")
    (tmp_path / "exits.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def failing(**columns: Any) -> list[float]:
        raise KeyError("answer")

    with pytest.raises(ValueError, match="mine:failing failed: KeyError: 'answer'"):
        RewardFunction("mine:failing", failing)([{"prompt": "a"}], ["x"])
    for name, message in {
        "exact": "'exact' is not a reward: use exact_match, json, a function as module:function",
        "no_such_module:f": "the module no_such_module cannot be imported",
        "tests.cli.pairs:nothing": "tests.cli.pairs has no function nothing",
        ":f": "':f' is not a reward",
        "wrong_syntax:f": "the module wrong_syntax failed with SyntaxError",
        "exits:f": "the module exits failed with SystemExit: 3",
    }.items():
        with pytest.raises(ValueError, match=message):
            load_reward(name)


def test_a_reward_function_imports_its_neighbours_when_it_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lazy_reward.py").write_text(
        "def f(**columns):\n    import lazy_neighbour\n    return [lazy_neighbour.X]"
    )
    (tmp_path / "lazy_neighbour.py").write_text("X = 0.5")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert load_reward("lazy_reward:f")([{"prompt": "a", "completions": ["b"]}], ["x"]) == [0.5]


def save_judge(folder: Path, seed: int = 0, **options: Any) -> None:
    """A reward model."""
    layers = (regard.Repeat((regard.Block((regard.Sublayer(regard.Attention(2, position=regard.Rope())),)),)),)
    spec = regard.Encoder(regard.Tokens(TOKENIZER.vocab_size), 16, layers, head=regard.Classification(1), **options)
    regard.save(spec.build(seed), folder, TOKENIZER)


def test_a_resumed_run_has_the_reward_model_of_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_judge(tmp_path / "judge")
    monkeypatch.chdir(tmp_path)
    started = with_reward_path(GRPO(reward="judge"))
    assert isinstance(started, GRPO) and started.reward == str(tmp_path / "judge")
    assert with_reward_path(started) == started and with_reward_path(GRPO(reward="json")) == GRPO(reward="json")
    load_reward(started.reward, weights=started.reward_weights)
    save_judge(tmp_path / "judge", seed=1)
    with pytest.raises(ValueError, match=r"the weights of objective.reward=.*judge are not those that the run started"):
        load_reward(started.reward, weights=started.reward_weights)
    shutil.rmtree(tmp_path / "judge")
    with pytest.raises(ValueError, match=r"objective.reward=.*judge does not exist any more; restore it"):
        load_reward(started.reward, weights=started.reward_weights)


def test_a_reward_model_scores_prompts_with_completions(tmp_path: Path) -> None:
    save_judge(tmp_path / "judge")
    reward = load_reward(str(tmp_path / "judge"))
    examples = [{"prompt": "a"}, {"prompt": "a longer prompt"}]
    together = reward(examples, ["b", "c d e"])
    alone = [reward([example], [text])[0] for example, text in zip(examples, ("b", "c d e"), strict=True)]
    assert together == pytest.approx(alone, abs=1e-5) and together[0] != together[1]


def test_a_reward_model_reads_at_most_its_context_and_no_end_after_a_completion_that_was_cut_off(
    tmp_path: Path,
) -> None:
    save_judge(tmp_path / "whole")
    save_judge(tmp_path / "short", context=8)
    whole, short = (load_reward(str(tmp_path / name)) for name in ("whole", "short"))
    assert isinstance(whole, RewardModel)
    ids = [*TOKENIZER.prefix_ids, *TOKENIZER.encode("a longer prompt and its end"), TOKENIZER.eos]

    def logit(ids: list[int]) -> float:
        return float(whole.model(torch.tensor([ids]))[0, 0])

    examples, texts = [{"prompt": "a longer prompt"}], [" and its end"]
    assert whole(examples, texts) == pytest.approx([logit(ids)], abs=1e-5)
    assert short(examples, texts) == pytest.approx([logit([ids[0], *ids[-7:]])], abs=1e-5)
    assert whole(examples, texts, [True]) == pytest.approx([logit(ids[:-1])], abs=1e-5)
    chat = [{"role": "user", "content": "b"}]
    assert TOKENIZER.stop_ids[0] not in sequence_ids("a", "b", TOKENIZER, truncated=True)
    answered = sequence_ids(chat, "c", TOKENIZER, truncated=True)
    assert answered.tolist() == sequence_ids(chat, "c", TOKENIZER).tolist()[: len(answered)]
    assert TOKENIZER.decode(answered.tolist()).endswith("c")
