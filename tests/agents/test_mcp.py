"""The MCP client against a server that behaves well, and against servers that do not."""

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from regard.agents.loop import run_agent
from regard.agents.mcp import McpError, McpServer
from regard.agents.tool import Toolbox, ToolFailure
from tests.agents.scripted import ScriptedWriter, call

SCRIPT = Path(__file__).parent / "fake_mcp_server.py"


def command(behaviour: str = "good") -> str:
    return shlex.join([sys.executable, str(SCRIPT), behaviour])


@pytest.fixture(scope="module")
def server() -> Iterator[McpServer]:
    with McpServer(command()) as server:
        yield server


@pytest.mark.ledger("tool.call")
def test_tools_are_listed_and_called(server: McpServer) -> None:
    box = Toolbox(server.tools)
    names = [
        "upper",
        "fail",
        "die",
        "sleep",
        "garbage",
        "ask",
        "environment",
        "ping",
        "notify",
        "log",
        "huge",
        "close",
        "orphan",
    ]
    assert box.names == names
    assert box.tools["upper"].description == "The tool upper."
    assert box.run("upper", {"text": "ünï"}) == "ÜNÏ"
    with pytest.raises(ToolFailure, match="^it is closed$"):
        box.run("fail", {"text": "x"})
    with pytest.raises(ToolFailure, match="text is missing"):
        box.run("upper", {})


def test_requests_of_the_server_are_answered(server: McpServer) -> None:
    picture, answers = server.call("ask", {}).split("\n")
    ping, sampling = json.loads(answers)
    assert picture == "(image)" and ping == {"jsonrpc": "2.0", "id": "s1", "result": {}}
    assert sampling["error"]["code"] == -32601


def test_the_environment_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "hidden")
    with McpServer(command()) as server:
        assert {"SECRET_KEY"}.isdisjoint(json.loads(server.call("environment", {})))


def test_older_versions_and_servers_without_tools(server: McpServer) -> None:
    assert server.version == "2025-06-18"
    with McpServer(command("old")) as old:
        assert old.version == "2024-11-05" and len(old.tools) == 13
    with McpServer(command("none")) as none:
        assert none.tools == []


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("dead", "has ended with exit code 1: no licence"),
        ("silent", "did not answer initialize in time"),
        ("noisy", "wrote b'Welcome!.*', which is no message of the protocol"),
        ("future", "speaks version '2099-01-01' of the protocol, not 2025-06-18"),
        ("refusing", "refuses tools/list: not today"),
        ("agreeing", "has capabilities=true, which must be an object"),
        ("five", "has capabilities=5, which must be an object"),
        ("nameless", "lists a tool without a name"),
        ("huge", "a message of more than 4194304 bytes"),
        ("endless", "more than 20 pages"),
    ],
)
def test_a_bad_server_is_a_clear_error(behaviour: str, message: str) -> None:
    with pytest.raises(McpError, match=message):
        McpServer(command(behaviour), start_seconds=2 if behaviour == "silent" else 20)


@pytest.mark.parametrize(("text", "message"), [("", "is empty"), ("/no/such/program", "cannot be started: No such")])
def test_a_command_that_cannot_be_started_is_refused(text: str, message: str) -> None:
    with pytest.raises(McpError, match=message):
        McpServer(text)


def test_a_server_that_dies_in_a_call_is_a_result() -> None:
    with McpServer(command()) as server:
        for _ in range(2):
            with pytest.raises(ToolFailure, match="has ended with exit code 3: out of luck"):
                server.call("die", {"text": "x"})


def test_garbage_and_late_answers() -> None:
    with McpServer(command(), seconds=1) as server:
        with pytest.raises(ToolFailure, match="wrote b'Traceback: no JSON"):
            server.call("garbage", {})
        with pytest.raises(ToolFailure, match="did not answer tools/call in time"):
            server.call("sleep", {})
        time.sleep(1)
        assert server.call("upper", {"text": "a"}) == "A"  # the late answer belongs to another request


def test_a_server_that_sends_without_end_and_reads_nothing_is_stopped_by_the_deadline() -> None:
    with McpServer(command(), seconds=1) as server:
        with pytest.raises(ToolFailure, match="did not answer tools/call in time"):
            server.call("notify", {})
        assert len(server.unread) < 1 << 16  # the rest stays in the pipe
        with pytest.raises(ToolFailure, match="did not read its input in time, and was ended"):
            server.call("upper", {"text": "x" * 10**6})
    with McpServer(command(), seconds=1) as server:
        for message in ("did not read its input in time, and was ended", "has ended with exit code -15"):
            with pytest.raises(ToolFailure, match=message):
                server.call("ping", {})


def test_a_server_that_writes_before_it_reads_is_read_meanwhile() -> None:
    with McpServer(command(), seconds=10) as server:
        server.call("log", {})
        assert server.call("upper", {"text": "x" * 10**6}) == "X" * 10**6


def test_a_line_that_is_too_long_concerns_its_call_only() -> None:
    with McpServer(command(), seconds=20) as server:
        with pytest.raises(ToolFailure, match="a message of more than 4194304 bytes"):
            server.call("huge", {})
        assert server.call("upper", {"text": "a"}) == "A"


def test_a_server_that_closes_its_output_is_ended() -> None:
    with McpServer(command()) as server:
        for message in ("has ended", "has ended with exit code -15"):
            with pytest.raises(ToolFailure, match=message):
                server.call("close", {})


def test_numbers_that_json_does_not_have_are_refused(server: McpServer) -> None:
    with pytest.raises(ToolFailure, match="have NaN or an infinity"):
        server.call("upper", {"text": float("nan")})
    assert server.call("upper", {"text": "a"}) == "A"


def test_a_process_that_keeps_the_pipes_does_not_stop_the_end() -> None:
    with McpServer(command()) as server:
        pid = int(server.call("orphan", {}))
        server.close()
        os.kill(pid, signal.SIGKILL)  # it still ran
    server.thread.join()


def test_lone_surrogates_are_replaced(server: McpServer) -> None:
    assert server.call("upper", {"text": "a\ud83d\ude00\ud83d"}) == "A😀?"


def test_a_tool_with_another_name_is_renamed() -> None:
    with pytest.warns(UserWarning) as warned:
        server = McpServer(command("dotted"))
    assert "the tool 'files.read' of" in str(warned[0].message) and "is offered as 'files_read'" in str(
        warned[0].message
    )
    assert len(warned) == 3
    with server:
        assert server.tools[0].description == "?"
        names = {"files_read": "files.read", "files_read_2": "files_read", "files_read_3": "files/read"}
        for offered, name in names.items():
            assert Toolbox(server.tools).run(offered, {"text": "x"}) == name


@pytest.mark.ledger("tool.agent")
def test_the_loop_goes_on_when_a_server_is_killed() -> None:
    with McpServer(command()) as server:

        def kill(messages: object) -> str:
            os.killpg(server.process.pid, signal.SIGKILL)
            return call("upper", '{"text": "b"}')

        writer = ScriptedWriter(call("upper", '{"text": "a"}'), kill, "It has ended.")
        events = list(run_agent(writer, Toolbox(server.tools), [{"role": "user", "content": "?"}]))
    first, second = (event.fields for event in events if event.kind == "result")
    assert first["text"] == "A" and "has ended with exit code -9" in second["text"] and second["error"]
    assert events[-1].fields["answer"] == "It has ended."


def test_a_server_ends_with_its_block() -> None:
    with McpServer(command()) as server:
        pass
    assert server.process.poll() is not None
    server.close()
