"""Warm-up of the batch size: the first batches have fewer rows, no example is left out, and resuming is exact."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from regard.data.loader import Loader
from regard.data.prefetch import Prefetcher
from regard.data.sources.world import WorldStories
from regard.objectives.next_token import NextToken
from regard.spec import SpecError
from regard.training.progress import describe_data
from regard.training.recipe import find_recipe, read_recipe, resolve
from tests.training.tiny import SETTINGS, TOKENIZER, curve, trainer

SIZES = [2, 2, 4, 4, 8, 8, 16, 16]  # of 16 rows with a warm-up of 6 batches


def warming(warmup: int = 6, **ranks: int) -> Loader:
    return Loader(WorldStories().open().train, NextToken(), TOKENIZER, rows=16, length=24, warmup=warmup, **ranks)


def test_the_first_batches_have_an_eighth_a_quarter_and_a_half_of_the_rows_and_leave_nothing_out() -> None:
    loader, whole = warming(), warming(warmup=0)
    batches = [next(loader) for _ in SIZES]
    assert [batch.size for batch in batches] == SIZES
    rows = torch.cat([batch.tokens for batch in batches])
    expected = torch.cat([next(whole).tokens for _ in range(4)])
    assert torch.equal(rows, expected[: len(rows)])


def test_the_ranks_share_every_batch() -> None:
    whole, parts = warming(), [warming(rank=rank, ranks=2) for rank in range(2)]
    for size in SIZES:
        batch, shares = next(whole), [next(part) for part in parts]
        assert [share.size for share in shares] == [size // 2] * 2
        assert torch.equal(batch.tokens, torch.cat([share.tokens for share in shares]))


@pytest.mark.parametrize("stop", [1, 3, 6, 7])
def test_a_loader_resumes_inside_the_warm_up(stop: int) -> None:
    loader = Prefetcher(warming(), depth=3)
    for _ in range(stop):
        next(loader)
    state = json.loads(json.dumps(loader.state_dict()))
    expected = [next(loader) for _ in range(3)]
    loader.close()
    resumed = warming()
    resumed.load_state_dict(state)
    for batch in expected:
        assert torch.equal(batch.tokens, next(resumed).tokens)


def test_a_run_resumes_exactly_and_counts_the_tokens_of_its_batches(tmp_path: Path) -> None:
    settings = replace(SETTINGS, steps=8, save_every=1, accumulate=2, evaluate_every=0)
    trainer(tmp_path / "whole", settings, loader=warming()).train()
    stopped = trainer(tmp_path / "resumed", settings, loader=warming())
    step = stopped.step

    def stop_after_three(batch, position, start):
        if position.step == 3:
            raise KeyboardInterrupt
        return step(batch, position, start)

    stopped.step = stop_after_three
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    trainer(tmp_path / "resumed", settings, loader=warming()).train()
    assert curve(tmp_path / "resumed") == curve(tmp_path / "whole")
    loader = warming()
    counts = torch.tensor([next(loader).token_count for _ in SIZES]).cumsum(0)
    assert [line["tokens"] for line in curve(tmp_path / "whole") if "loss" in line] == counts.tolist()


def test_the_summary_counts_the_smaller_batches() -> None:
    assert warming().total_size(8) == sum(SIZES) * 24 and warming().total_size(3) == 8 * 24
    assert warming(warmup=0).total_size(8) == 8 * 16 * 24
    assert describe_data(warming(), 8)[0] == "steps: 8 of up to 384 tokens, 1,440 in total"


def test_rows_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(ValueError, match="use a multiple of 32"):
        warming(rank=0, ranks=4)
    with pytest.raises(SpecError, match=r"data.rows=16.*train.accumulate=4.*a multiple of 32"):
        resolve(read_recipe(find_recipe("demo"), {"data.batch_warmup": 9, "data.rows": 16, "train.accumulate": 4}))
