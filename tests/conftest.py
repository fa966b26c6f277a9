"""Configuration of all tests: fixed seeds, derandomized hypothesis, and skips if there is no GPU or browser."""

import os
import random
import shutil
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("quick", max_examples=30, derandomize=True, deadline=None, database=None)
settings.register_profile("thorough", settings.get_profile("quick"), max_examples=200)
settings.load_profile("quick")

# Without a GPU, Triton interprets its kernels. It reads the variable when it is first imported.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell without a terminal ignores Ctrl-C in the programs that it starts in the background, and they in theirs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# fsync matters only if the machine fails, and waits for everything that other programs write to the disk.
os.fsync = lambda handle: None

# The quick tests of these folders run on the oldest torch too: their code depends most on the version of torch. Tests
# elsewhere carry the mark `oldest`: laws in float32, one family per shape, compiled models.
OLDEST_FOLDERS = ("tests/engine/", "tests/kernels/", "tests/training/")
NOT_OLDEST = (  # files of these folders whose code hardly calls torch, or whose calls are those of quicker files
    "tests/engine/test_batching.py",  # as in test_greedy_trials.py and test_random_requests.py
    "tests/engine/test_beam.py",
    "tests/engine/test_contrastive.py",
    "tests/engine/test_generation_options.py",
    "tests/engine/test_grammar.py",
    "tests/engine/test_json_schema.py",
    "tests/training/test_prepare_data.py",
)

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        in_folder = item.nodeid.startswith(OLDEST_FOLDERS) and not item.nodeid.startswith(NOT_OLDEST)
        if in_folder and not item.get_closest_marker("slow"):
            item.add_marker("oldest")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("browser") and CHROMIUM is None:
        pytest.skip("no chromium on this machine (Debian: apt-get install chromium)")
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device on this machine")


@pytest.fixture(autouse=True)
def seeded() -> None:
    random.seed(0)
    if torch := sys.modules.get("torch"):  # not imported here, because that takes seconds
        torch.manual_seed(0)


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of the browser, for `playwright.chromium.launch(executable_path=…, args=["--no-sandbox"])`."""
    assert CHROMIUM, "only tests marked `browser` may use this fixture"
    return CHROMIUM


@pytest.fixture(scope="session")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a demo that was trained for three steps; do not change it."""
    from tests.cli.conftest import regard

    out = tmp_path_factory.mktemp("runs") / "demo"
    result = regard("demo", "--out", out, "--steps", 3, "--questions", 5)
    assert result.exit_code == 0, result.output
    return out
