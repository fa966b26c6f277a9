"""`regard serve` in a separate process, used by the openai client and by a browser."""

import io
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import torch
from rich.console import Console

from regard.cli.open_engine import EngineOptions, choose_compile, open_engine
from regard.cli.open_model import open_model
from regard.cli.open_served import announced
from regard.engine.runner import Runner
from regard.server.network_options import NetworkOptions
from tests.cli.conftest import regard
from tests.server.server_process import read_url

QUESTION = "Anna is in the barn. Where is Anna?"


@pytest.fixture(scope="module")
def address(demo_run: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "regard", "serve", str(demo_run), "--port", "0", "--name", "demo", "--rows", "3"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        url, printed = read_url(server)
        assert re.search(r"rows +3  \(--rows\)", printed) and re.search(r"dtype +float32  \(as stored", printed)
        assert re.search(r"compile +off", printed) and re.search(r"context +\d+ tokens  \(the model's\)", printed)
        yield url
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=60) in (0, -signal.SIGTERM)


@pytest.mark.parametrize(
    ("asked", "device", "compiler", "value", "reason"),
    [
        (None, "cpu", True, "off", "--compile turns it on"),
        (True, "cpu", True, "on", "--compile"),
        (True, "cpu", False, "off", "needs a C++ compiler"),
        (False, "cuda", True, "off", "--no-compile"),
        (None, "cuda", False, "on", "decodes faster"),
    ],
)
def test_compilation_is_chosen_by_the_device_and_the_option(
    asked: bool | None, device: str, compiler: bool, value: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: name if compiler else None)
    choice = choose_compile(asked, torch.device(device))
    assert choice.value == value and reason in choice.reason


def test_drafters_that_read_hidden_states_are_not_compiled_unless_asked() -> None:
    for speculate in ("self", "medusa:heads", "eagle:layer"):
        choice = choose_compile(None, torch.device("cuda"), None, speculate)
        assert choice.value == "off" and f"--speculate {speculate} runs eagerly" in choice.reason
    assert choose_compile(None, torch.device("cuda"), None, "self:2").value == "on"


def test_a_model_that_cannot_be_compiled_is_said_to_be_decoded_eagerly(
    demo_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Runner, "compile_step", lambda self: None)
    console = Console(file=io.StringIO(), width=200)
    open_engine(open_model(demo_run), console, EngineOptions(context=64, rows=1, compile=True))
    assert re.search(r"compile +off  \(torch cannot compile this model", console.file.getvalue())


def test_decode_steps_are_prepared_before_the_first_request(demo_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "warm_up", lambda self, progress: [progress(done, 2) for done in range(3)])
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    open_engine(open_model(demo_run), console, EngineOptions(context=64, rows=1, compile=False))
    assert "preparing decode steps" in console.file.getvalue() and "2/2" in console.file.getvalue()


def test_what_takes_long_is_said_before_it_starts() -> None:
    for terminal in (False, True):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
        with announced(console, "loading a[b] …"):
            assert terminal or console.file.getvalue() == "loading a[b] …\n"
        assert "loading a[b] …" in console.file.getvalue()
        assert ("\x1b" in console.file.getvalue()) == terminal  # a spinner, which disappears


def test_the_dtype_of_the_weights_is_chosen(demo_run: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    options = EngineOptions(context=64, dtype="float16", memory=0.001, queue=5, compile=False)
    open_engine(llm := open_model(demo_run, dtype="float16"), console, options)
    assert llm.model.embedding.weight.dtype == torch.float16 and llm.engine.queue == 5
    printed = console.file.getvalue()
    assert (
        "GB  (--memory 0.001)" in printed
        and "float16  (--dtype)" in printed
        and "64 tokens  (--context)" in printed
        and "off  (--no-compile)" in printed
    )


def test_a_context_that_the_memory_limits_is_said_to_be_smaller(demo_run: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    open_engine(llm := open_model(demo_run), console, EngineOptions(context=200, rows=2, memory=1e-9))
    assert llm.engine.capacity < 200 and f"{llm.engine.capacity} tokens  (what the store" in console.file.getvalue()


def test_the_options_of_the_server_are_passed_on(demo_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[NetworkOptions] = []
    monkeypatch.setattr("regard.server.run_server.serve", lambda models, network, **_: calls.append(network))
    given = ("--port", 9000, "--allow-host", "a.example", "--allow-host", "b.example", "--max-body", 5000)
    assert regard("serve", demo_run, *given, "--allow-origin", "https://c.example", "--access-log").exit_code == 0
    assert regard("serve", demo_run).exit_code == 0
    names = {"allow_hosts": ("a.example", "b.example"), "allow_origins": ("https://c.example",)}
    assert calls == [NetworkOptions(port=9000, **names, access_log=True, max_body=5000), NetworkOptions()]


@pytest.mark.parametrize(
    ("value", "given", "keys"),
    [
        ("correct horse, second", (), ["correct horse", "second"]),
        ("unused", ("--key", "a b", "--key", "c,d"), ["a b", "c", "d"]),
        ("", (), []),
    ],
)
def test_keys_are_separated_by_commas_only(
    demo_run: Path, monkeypatch: pytest.MonkeyPatch, value: str, given: tuple[str, ...], keys: list[str]
) -> None:
    calls: list[NetworkOptions] = []
    monkeypatch.setattr("regard.server.run_server.serve", lambda models, network, **_: calls.append(network))
    monkeypatch.setenv("REGARD_KEY", value)
    result = regard("serve", str(demo_run), *given)
    assert result.exit_code == 0, result.output
    assert list(calls[0].keys) == keys


def test_several_models_are_served_by_their_names(demo_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list = []
    monkeypatch.setattr("regard.server.run_server.serve", lambda models, *_, **__: calls.extend(models))
    result = regard("serve", demo_run, f"other={demo_run}", "--memory", 0.02, "--rows", 1)
    assert result.exit_code == 0 and [model.name for model in calls] == [demo_run.name, "other"]
    assert result.stderr.count("--memory 0.02, for 2 models in equal parts") == 2
    assert calls[0].engine is not calls[1].engine


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("{run}", "{run}"), "several models have the name"),
        (("a={run}", "a={run}"), "several models have the name 'a'; give other names, such as a-2={run}"),
        (("{run}", "b={run}", "--name", "c"), "--name c is for one model; name several as NAME=MODEL, such as c={run}"),
        (("{run}", "b={run}", "--adapter", "x"), "--adapter is for one model"),
        (("{run}", "b=nosuch"), "'nosuch' is neither a file or folder nor a known name"),
        (("{run}", "--batch-invariant", "--tensor-parallel", "2"), "does not support --tensor-parallel"),
        (("{run}", "--quantize", "int8", "--batch-invariant"), "--batch-invariant does not support --quantize"),
        (("{run}", "--quantize", "int8", "--tensor-parallel", "2"), "--quantize does not support --tensor-parallel"),
        (("{run}", "--batch-invariant", "--device", "cpu"), "batch_invariant needs a CUDA GPU, not cpu"),
    ],
)
def test_ambiguous_names_and_options_are_refused(demo_run: Path, given: tuple[str, ...], message: str) -> None:
    result = regard("serve", *(text.format(run=demo_run) for text in given))
    assert isinstance(result.exception, ValueError) and message.format(run=demo_run) in str(result.exception)


def test_an_address_without_a_key_is_refused_before_the_model_is_loaded(demo_run: Path) -> None:
    refused = regard("serve", demo_run, "--host", "0.0.0.0")
    assert isinstance(refused.exception, ValueError) and "set a key" in str(refused.exception)
    assert refused.stderr == ""


@pytest.mark.parametrize(
    "command",
    [("serve",), ("chat",), ("generate", "-p", "a"), ("batch", "/dev/null", "out"), ("bench serve",)],
    ids=lambda c: c[0],
)
def test_a_mistyped_model_is_refused_before_slow_imports(command: tuple[str, ...]) -> None:
    arguments = [sys.executable, "-X", "importtime", "-m", "regard", command[0], "nosuch", *command[1:]]
    result = subprocess.run(arguments, capture_output=True, text=True)
    assert result.returncode == 1 and "regard: 'nosuch' is neither a file or folder nor a known name" in result.stderr
    imported = {line.rsplit("|")[-1].strip() for line in result.stderr.splitlines()}
    assert not imported & {"torch", "numpy", "fastapi", "uvicorn", "prompt_toolkit", "httpx"}


def test_the_openai_client_works(address: str) -> None:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["demo"]
        completion = client.completions.create(
            model="demo", prompt="Anna is in", max_tokens=4, logprobs=3, temperature=0
        )
        logprobs = completion.choices[0].logprobs
        assert len(logprobs.tokens) == completion.usage.completion_tokens <= 4
        assert all(len(top) >= 3 for top in logprobs.top_logprobs)
        request = {
            "model": "demo",
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": 6,
            "temperature": 0,
        }
        whole = client.chat.completions.create(**request).choices[0].message.content
        chunks = client.chat.completions.create(**request, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole


@pytest.mark.browser
def test_the_page_chats_and_shows_attention(address: str, chromium: str, tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 860})
        page.set_default_timeout(60_000)
        page.goto(address)
        page.fill("#prompt", QUESTION)
        page.keyboard.press("Enter")
        page.wait_for_selector(".chat-stats:has-text('per second')")
        page.locator(".chat-model .chat-content .chat-token").first.hover()
        assert "%" in page.locator("#card").inner_text()
        page.wait_for_selector(".chat-attention canvas")
        page.wait_for_selector(".chat-weighted")
        assert page.screenshot(path=str(tmp_path / "page.png"))
        browser.close()
