"""Processes of a tensor parallel engine that end, or do not start. A process can be in one group at a time."""

import os
import signal
import time

import pytest
import torch

from regard.engine.ranks import RankError, Ranks
from regard.engine.request import Sampling
from regard.models.decoder import DecoderModule
from tests.engine.test_tensor_parallel import LAYERS, build
from tests.server.conftest import wait_until


def build_small(device: torch.device) -> DecoderModule:
    return build(device, vocab=61, layers=LAYERS[:1])


@pytest.mark.slow
def test_a_rank_that_ends_stops_the_engine_without_a_hang() -> None:
    reasons: list[str] = []
    threads = torch.get_num_threads()
    with Ranks(build_small, 2, "cpu", reasons.append) as ranks:
        engine = ranks.open_engine(build_small(torch.device("cpu")), rows=2)
        request = engine.submit([1, 2, 3], Sampling(max_new=100, temperature=0))
        for _ in range(3):
            engine.step()
        assert ranks.processes[0].pid is not None
        os.kill(ranks.processes[0].pid, signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(RankError, match="rank"):
            for _ in range(100):
                engine.step()
        wait_until(lambda: reasons)
        assert time.monotonic() - begin < 90 and len(reasons) == 1 and request.finish is None
        with pytest.raises(RankError):
            engine.step()
    torch.set_num_threads(threads)


def fail_to_build(device: torch.device) -> DecoderModule:
    raise ValueError("the folder is not there")


@pytest.mark.slow
def test_a_rank_that_cannot_load_the_model_is_reported() -> None:
    threads = torch.get_num_threads()
    with (
        Ranks(fail_to_build, 2, "cpu") as ranks,
        pytest.raises(RankError, match="rank 1 did not start: the folder is not there"),
    ):
        ranks.open_engine(build_small(torch.device("cpu")))
    torch.set_num_threads(threads)


def test_no_process_starts_for_a_model_that_cannot_be_divided() -> None:
    model = build_small(torch.device("cpu"))
    with Ranks(build_small, 3, "cpu") as ranks, pytest.raises(ValueError, match="kv_heads=2 is not divisible by"):
        ranks.open_engine(model)
    assert not ranks.processes and model.stack.blocks[0].sublayers[0].body.kv_heads == 2
