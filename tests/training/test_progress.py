"""Progress: a bar in a terminal, lines elsewhere."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from regard.adapt import LoRA, add_lora
from regard.data.loader import Loader
from regard.data.sources.base import Shuffled
from regard.objectives.next_token import NextToken
from regard.training.progress import Bar, Lines, format_duration, progress_listener, summarize
from tests.training.tiny import SETTINGS, SPEC, TOKENIZER, trainer


def printed(path: Path, terminal: bool) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120, color_system=None)
    listener = progress_listener(console)
    if isinstance(listener, Lines):
        listener.every = float("inf")  # seconds; so that a slow machine prints no more lines
    trainer(path, listener=listener).train()
    return console.file.getvalue()


def test_the_listener_depends_on_the_console() -> None:
    assert isinstance(progress_listener(Console(file=io.StringIO(), force_terminal=True)), Bar)
    assert isinstance(progress_listener(Console(file=io.StringIO())), Lines)


def test_a_terminal_shows_a_bar(tmp_path: Path) -> None:
    text = printed(tmp_path, terminal=True)
    for part in ("training", "10/10", "loss ", "tokens/s", "step 5  held out: loss"):
        assert part in text


def test_other_outputs_get_lines(tmp_path: Path) -> None:
    lines = printed(tmp_path, terminal=False).splitlines()
    summary, lines = lines[:3], lines[3:]
    parameters = sum(p.numel() for p in SPEC.build(0).parameters())
    assert summary[0] == f"parameters: {parameters:,}, all trained"
    assert summary[1] == "steps: 10 of up to 96 tokens, 960 in total"
    assert summary[2] == "device: cpu, float32"
    assert lines[0].startswith("step 1/10  loss ") and lines[0].endswith(" left")
    assert lines[1].startswith("step 5  held out: loss ")
    assert lines[2].startswith("step 10/10  loss ") and "0:00 left" in lines[2]
    assert len(lines) == 4


def test_a_skipped_step_is_shown() -> None:
    console = Console(file=io.StringIO())
    lines = Lines(console)
    lines.started(0, 1)
    lines.stepped({"step": 1, "loss": None, "tokens_per_second": 10.0, "seconds": 1.0})
    assert "loss skipped" in console.file.getvalue()


def test_the_reward_of_a_step_is_shown_and_zero_has_no_sign() -> None:
    console = Console(file=io.StringIO(), width=200)
    lines = Lines(console)
    lines.started(0, 1)
    record = {"step": 1, "loss": -1e-6, "reward": 0.25, "kl": 0.01, "entropy": 1.0, "tokens_per_second": 10.0}
    lines.stepped({**record, "seconds": 1.0})
    assert "loss 0.0000  reward 0.2500  kl 0.0100  10 tokens/s" in console.file.getvalue()


def test_the_summary_counts_trained_parameters_and_epochs() -> None:
    model = SPEC.build(0)
    add_lora(model, LoRA(rank=2), seed=1)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    documents = [{"text": "x" * 50, "end": False}] * 9 + [{"text": "y" * 150, "end": False}]
    data = Loader(Shuffled("few", documents, "fingerprint"), NextToken(), TOKENIZER, rows=2, length=30)
    lines = summarize(model, data, replace(SETTINGS, steps=20), torch.device("cpu"))
    assert f", {trained:,} trained (" in lines[0]
    assert lines[1] == "steps: 20 of up to 60 tokens, 1,200 in total"
    assert lines[2] == "data: about 590 tokens, so the run has 2.0 epochs"


def test_the_summary_tells_the_size_of_a_text_of_which_an_epoch_has_slices() -> None:
    documents = [{"text": "x" * 91, "end": False}] * 9 + [{"text": "y" * 191, "end": False}]
    data = Loader(Shuffled("few", documents, "0"), NextToken(slices="random"), TOKENIZER, rows=2, length=30)
    lines = summarize(SPEC.build(0), data, replace(SETTINGS, steps=40), torch.device("cpu"))
    assert lines[2] == (
        "data: about 1,000 tokens; an epoch takes one slice of each document, 300 tokens in all, so the run has 8.0 "
        "epochs and reads 2.4 times the size of the data"
    )


@pytest.mark.parametrize(("seconds", "text"), [(5, "0:05"), (65, "1:05"), (3665, "1:01:05"), (59.7, "1:00")])
def test_seconds_are_formatted_as_clock_time(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
