"""Tools of MCP servers over stdio: a small client of the Model Context Protocol.

    initialize ─▶ version and capabilities ─▶ notifications/initialized ─▶ tools/list ─▶ tools/call …

A message is one line of JSON-RPC 2.0. The server is a program that the user names; its answers and the descriptions of
its tools are data. Whatever it does (dies, writes garbage, never answers) is an `McpError` that says so; in a call it
becomes a result for the model.
"""

import itertools
import json
import os
import re
import select
import shlex
import signal
import subprocess
import threading
import time
import warnings
from collections import deque
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import IO, Any

from regard import __version__
from regard.agents.tool import NAME, AgentTool, ToolFailure

VERSIONS = ("2025-06-18", "2025-03-26", "2024-11-05")  # of the protocol, the newest first
START_SECONDS, CALL_SECONDS = 20.0, 60.0
MAX_LINE, PIECE = 4 << 20, 1 << 14  # bytes of a message, and of one read
MAX_TOOLS, MAX_PAGES, MAX_DESCRIPTION = 128, 20, 2000
INHERITED = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "USER")  # of the environment
METHOD_NOT_FOUND = -32601


class McpError(ValueError):
    """A server that cannot be started, breaks the protocol, ends or does not answer."""


class McpServer:
    """A running server, for a `with` block. seconds: the longest wait for the answer to a call."""

    def __init__(self, command: str, seconds: float = CALL_SECONDS, start_seconds: float = START_SECONDS):
        self.command, self.seconds = command, seconds
        arguments = shlex.split(command)
        if not arguments:
            raise McpError("the command of an MCP server is empty; give a program with its arguments")
        environment = {name: os.environ[name] for name in INHERITED if name in os.environ}
        pipe = subprocess.PIPE
        try:
            self.process = subprocess.Popen(
                arguments, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, start_new_session=True
            )
        except OSError as error:
            raise McpError(
                f"{command!r} cannot be started: {error.strerror}; give a program with its arguments"
            ) from None
        self.unread = bytearray()  # output of the server after the last message; more stays in the pipe
        self.skipping = False  # the rest of a line that is too long
        self.errors: deque[str] = deque(maxlen=5)  # the last lines of its standard error
        self.number = 0  # of the last request
        self.lock = threading.Lock()  # one request at a time
        self.thread = threading.Thread(target=self.read_errors, daemon=True)
        self.thread.start()
        try:
            self.initialize(time.monotonic() + start_seconds)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "McpServer":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def initialize(self, deadline: float) -> None:
        client = {"name": "regard", "version": __version__}
        parameters = {"protocolVersion": VERSIONS[0], "capabilities": {}, "clientInfo": client}
        found = self.request("initialize", parameters, deadline)
        self.version = found.get("protocolVersion")
        if self.version not in VERSIONS:
            raise self.failure(f"speaks version {self.version!r} of the protocol, not {', '.join(VERSIONS)}")
        capabilities = found.get("capabilities") or {}
        if not isinstance(capabilities, dict):
            raise self.failure(f"has capabilities={json.dumps(capabilities)[:80]}, which must be an object")
        self.notify("notifications/initialized", {}, deadline)
        self.tools = self.list_tools(deadline) if "tools" in capabilities else []

    def list_tools(self, deadline: float) -> list[AgentTool]:
        found: list[AgentTool] = []
        cursor: dict[str, Any] = {}
        for _ in range(MAX_PAGES):
            page = self.request("tools/list", cursor, deadline)
            if not isinstance(page.get("tools"), list):
                raise self.failure("answers tools/list without a list of tools")
            if len(found) + len(page["tools"]) > MAX_TOOLS:
                raise self.failure(f"has more than {MAX_TOOLS} tools")
            for each in page["tools"]:
                found.append(self.agent_tool(each, {tool.name for tool in found}))
            if not page.get("nextCursor"):
                return found
            cursor = {"cursor": page["nextCursor"]}
        raise self.failure(f"lists its tools on more than {MAX_PAGES} pages")

    def agent_tool(self, tool: Any, taken: Collection[str]) -> AgentTool:
        name, schema = (tool.get("name"), tool.get("inputSchema")) if isinstance(tool, dict) else (None, None)
        if not isinstance(name, str) or not name or not isinstance(schema, dict):
            raise self.failure(f"lists a tool without a name and a schema: {json.dumps(tool)[:80]}")
        description = str(tool.get("description") or "")[:MAX_DESCRIPTION]
        offered = allowed = name if NAME.fullmatch(name) else re.sub("[^a-zA-Z0-9_-]", "_", name)[:64]
        numbers = itertools.count(2)
        while offered in taken:
            offered = f"{allowed[:60]}_{next(numbers)}"
        if offered != name:
            warnings.warn(f"the tool {name[:200]!r} of {self.command!r} is offered as {offered!r}", stacklevel=2)
        return AgentTool(offered, description, {"type": "object"} | schema, lambda given: self.call(name, given))

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        deadline = time.monotonic() + self.seconds
        try:
            found = self.request("tools/call", {"name": name, "arguments": dict(arguments)}, deadline)
        except McpError as error:
            raise ToolFailure(str(error)) from None
        parts = found.get("content")
        parts = parts if isinstance(parts, list) else []
        texts = [text_of(part) for part in parts]
        if not texts and "structuredContent" in found:
            texts = [json.dumps(found["structuredContent"], ensure_ascii=False)]
        if found.get("isError"):
            raise ToolFailure("\n".join(texts) or "the tool failed")
        return "\n".join(texts) or "(no result)"

    def request(self, method: str, parameters: Mapping[str, Any], deadline: float) -> dict[str, Any]:
        """The result of a request. Requests of the server that come before it are answered."""
        with self.lock:
            self.number += 1
            number = self.number
            self.send({"jsonrpc": "2.0", "id": number, "method": method, "params": parameters}, deadline)
            while (message := self.receive(method, number, deadline)).get("id") != number or "method" in message:
                self.answer(message, deadline)
        if "error" in message:
            error = message["error"] if isinstance(message["error"], dict) else {}
            raise self.failure(f"refuses {method}: {str(error.get('message'))[:500]}")
        if not isinstance(message.get("result"), dict):
            raise self.failure(f"answers {method} without a result")
        return message["result"]

    def answer(self, message: Mapping[str, Any], deadline: float) -> None:
        """A ping is answered; other requests are refused, because this client offers nothing. The rest is ignored."""
        if "method" not in message or "id" not in message:
            return
        reply: dict[str, Any] = {"jsonrpc": "2.0", "id": message["id"]}
        if message["method"] == "ping":
            self.send(reply | {"result": {}}, deadline)
        else:
            error = {"code": METHOD_NOT_FOUND, "message": "this client has no such method"}
            self.send(reply | {"error": error}, deadline)

    def notify(self, method: str, parameters: Mapping[str, Any], deadline: float) -> None:
        self.send({"jsonrpc": "2.0", "method": method, "params": parameters}, deadline)

    def send(self, message: Mapping[str, Any], deadline: float) -> None:
        """What the server writes meanwhile is read too: it may read on only when its own pipe has room."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        try:
            data = memoryview(json.dumps(message, allow_nan=False).encode() + b"\n")
        except ValueError:
            raise McpError("the arguments have NaN or an infinity, which JSON does not have") from None
        try:
            while data:
                wanted = {stdin: select.POLLOUT} | ({stdout: select.POLLIN} if len(self.unread) <= MAX_LINE else {})
                found = ready(wanted, deadline)
                if stdin in found:
                    data = data[os.write(stdin.fileno(), data[: select.PIPE_BUF]) :]  # never blocks
                elif stdout in found:
                    self.read_piece()
                else:
                    break
        except McpError:
            raise
        except (OSError, ValueError):
            raise self.ended() from None
        except BaseException:  # such as Ctrl-C
            self.close()  # part of the message may be in the pipe
            raise
        if data:
            self.close()  # part of the message may be in the pipe: no other can follow it
            raise self.failure("did not read its input in time, and was ended")

    def receive(self, method: str, number: int, deadline: float) -> dict[str, Any]:
        """The next message of the server; blank lines are skipped."""
        line = b""
        while not line.strip():
            line = self.next_line(method, number, deadline)
        try:  # twice, because strings of JSON may have lone surrogates, and UTF-8 does not
            message = json.loads(json.dumps(json.loads(line), ensure_ascii=False).encode("utf-8", "replace"))
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise self.failure(f"wrote {line[:80]!r}, which is no message of the protocol")
        return message

    def next_line(self, method: str, number: int, deadline: float) -> bytes:
        while (end := self.unread.find(b"\n")) < 0 or time.monotonic() > deadline:
            if end < 0 and len(self.unread) > MAX_LINE:
                self.unread.clear()
                if not self.skipping:
                    self.skipping = True  # up to the end of this line
                    raise self.failure(f"wrote a message of more than {MAX_LINE} bytes")
            assert self.process.stdout is not None
            if not ready({self.process.stdout: select.POLLIN}, deadline):
                cancelled = {"requestId": number, "reason": "timeout"}
                self.notify("notifications/cancelled", cancelled, time.monotonic() + 1)
                raise self.failure(f"did not answer {method} in time")
            self.read_piece()
        line = bytes(self.unread[:end])
        del self.unread[: end + 1]  # does not copy the rest
        if self.skipping:
            self.skipping, line = False, b""
        return line

    def read_piece(self) -> None:
        assert self.process.stdout is not None
        piece = os.read(self.process.stdout.fileno(), PIECE)
        if not piece:
            raise self.ended()
        self.unread += piece

    def read_errors(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            while line := stream.readline(1000):
                self.errors.append(line.decode("utf-8", "replace").strip())

    def ended(self) -> McpError:
        code = ""
        try:
            code = f" with exit code {self.process.wait(5)}"
            self.thread.join(1)  # reads the last lines of its standard error
        except subprocess.TimeoutExpired:  # it has only closed its pipes
            self.close()
        return self.failure(f"has ended{code}")

    def failure(self, what: str) -> McpError:
        last = self.errors[-1] if self.errors else ""
        return McpError(f"the MCP server {self.command!r} {what}" + (f": {last[:200]}" if last else ""))

    def close(self) -> None:
        """End the server: the end of its input, then SIGTERM, then SIGKILL, to all that it has started."""
        if self.process.stdin is not None:
            self.process.stdin.close()  # never blocks: `send` leaves nothing in its buffer
        for kind in (None, signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                if kind is not None:
                    os.killpg(self.process.pid, kind)
                self.process.wait(1)
        if self.process.stdout is not None:
            self.process.stdout.close()


def ready(events: Mapping[IO[bytes], int], deadline: float) -> set[IO[bytes]]:
    """The pipes that can be read or written, or have ended, as soon as there is one; none after the deadline."""
    poll = select.poll()
    for stream, event in events.items():
        poll.register(stream, event)
    left = deadline - time.monotonic()
    found = {handle for handle, _ in poll.poll(left * 1000)} if left > 0 else set()
    return {stream for stream in events if stream.fileno() in found}


def text_of(part: Any) -> str:
    """The text of a part of a result; of pictures and sounds only their kind."""
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return part["text"]
    if isinstance(part, dict) and isinstance(part.get("resource"), dict):
        return str(part["resource"].get("text") or part["resource"].get("uri") or "(a resource)")
    return f"({part.get('type', 'unknown') if isinstance(part, dict) else 'unknown'})"
