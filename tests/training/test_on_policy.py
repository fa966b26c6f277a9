"""On-policy distillation: sampled batches, their loss against a plain loop, the share of them, and resuming."""

import json
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import regard
from regard.data.loader import Loader
from regard.data.sources.base import open_collection
from regard.objectives.distillation import Distillation
from regard.reinforcement_run import EngineGenerator
from regard.training.on_policy import OnPolicyLoader
from regard.training.run import Run
from regard.training.teacher import TaughtObjective
from tests.cli import pairs
from tests.training.test_rollouts import LENGTH, ROWS, SPEC, assert_equal, last_files
from tests.training.tiny import TOKENIZER, curve

EXAMPLES = [{"prompt": f"Cat {n}?", "completion": f" yes, {n}"} for n in range(12)]


def loader_of(on_policy: float = 0.5, **settings: Any) -> OnPolicyLoader:
    objective = Distillation(on_policy=on_policy, max_new=5, **settings)
    examples = open_collection("prompts", EXAMPLES, 0, hold_out=False).train
    generate = EngineGenerator(SPEC.build(seed=1).train(), TOKENIZER, LENGTH, objective.max_new, ROWS)
    return OnPolicyLoader(Loader(examples, objective, TOKENIZER, ROWS, LENGTH), examples, objective, generate)


def test_sampled_batches_have_the_prompts_of_the_examples_and_completions_of_the_model() -> None:
    loader = loader_of(on_policy=1.0)
    batch = next(loader)
    for row in range(ROWS):
        counted = batch.weights[row] > 0
        first = int(counted.nonzero()[0])
        prompt = loader.examples.example(row)["prompt"]  # in a random order
        assert TOKENIZER.decode(batch.tokens[row, : first + 1].tolist()) == prompt
        assert 1 <= counted.sum() <= 5


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_loss_on_samples_equals_a_plain_loop(beta: float) -> None:
    batch = next(loader_of(on_policy=1.0))
    student, teacher = (SPEC.build(seed=seed).double().eval() for seed in (1, 2))
    loss, count, _ = TaughtObjective(Distillation(beta=beta, on_policy=1.0), teacher)(student, batch)
    expected, tokens = 0.0, 0
    for row in range(batch.size):
        length = int((batch.segments[row] >= 0).sum())
        ids = batch.tokens[row : row + 1, :length]
        p, q = (model(ids)[0].detach().softmax(-1) for model in (student, teacher))
        for t in range(length):
            if batch.weights[row, t] == 0:
                continue
            m = beta * q[t] + (1 - beta) * p[t]
            forward, reverse = (q[t] * (q[t] / p[t]).log()).sum(), (p[t] * (p[t] / q[t]).log()).sum()
            mixed = beta * (q[t] * (q[t] / m).log()).sum() + (1 - beta) * (p[t] * (p[t] / m).log()).sum()
            expected += float(forward if beta == 0 else reverse if beta == 1 else mixed)
            tokens += 1
    assert count == tokens and abs(loss.item() - expected) < 1e-9


def test_the_share_of_sampled_batches_and_the_others_are_those_of_the_loader() -> None:
    loader = loader_of(on_policy=0.5)
    plain = loader_of(on_policy=0.5).loader
    sampled = 0
    for _ in range(20):
        first, batch = loader.state_dict()["next"], next(loader)
        if loader.state_dict()["next"] > first:
            sampled += 1
        else:
            assert_equal(batch, next(plain))
    assert 5 <= sampled <= 15
    for ours, theirs in zip(islice(loader_of(on_policy=0.0), 4), loader_of().loader, strict=False):
        assert_equal(ours, theirs)


def test_a_restored_loader_continues_with_the_same_batches() -> None:
    loader = loader_of()
    list(islice(loader, 7))
    restored = loader_of()
    restored.load_state_dict(loader.state_dict())
    for _ in range(4):
        assert_equal(next(restored), next(loader))


def recipe_of(folder: Path) -> dict[str, Any]:
    tables = pairs.recipe("decoder, attention", "distillation", folder)
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, EXAMPLES)), encoding="utf-8")
    tables["objective"] |= {"on_policy": 0.5, "max_new": 4, "weight": 1.0}
    return tables


def test_settings_that_cannot_work_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="on_policy=0.5 needs weight=1, not 0.5"):
        Distillation(on_policy=0.5, weight=0.5)
    with pytest.raises(ValueError, match=r"on_policy=2.0 must be in \[0, 1\]"):
        Distillation(on_policy=2.0)
    texts = open_collection("texts", [{"text": "no prompt"}], 0, hold_out=False)
    with pytest.raises(ValueError, match="needs examples with `prompt` or `messages`"):
        Distillation(on_policy=0.5).fit(texts, SPEC)
    assert Distillation().fit(texts, SPEC).on_policy == 0
    tables = recipe_of(tmp_path)
    tables["data"] |= {"rows": 8, "batch_warmup": 2}
    with pytest.raises(ValueError, match="objective distillation samples its batches, which have no warm-up"):
        regard.train(tables, out=tmp_path / "run", device="cpu")
    tables = recipe_of(tmp_path)
    tables["objective"]["max_new"] = tables["data"]["length"]
    with pytest.raises(ValueError, match="leaves no token for a prompt before objective.max_new"):
        regard.train(tables, out=tmp_path / "run", device="cpu")


@pytest.mark.slow
def test_a_run_that_is_killed_resumes_bit_identically(tmp_path: Path) -> None:
    tables = recipe_of(tmp_path)
    tables["train"] |= {"steps": 7, "save_every": 1, "keep": 9, "lr": 1e-2}
    run, stopped = tmp_path / "run", tmp_path / "stopped"
    regard.train(tables, out=run, device="cpu")
    shutil.copytree(run, stopped)
    for later in range(4, 8):
        shutil.rmtree(Run.open(stopped).checkpoint(later))
    regard.train(resume=stopped, device="cpu")
    assert last_files(stopped) == last_files(run) and curve(stopped) == curve(run)
