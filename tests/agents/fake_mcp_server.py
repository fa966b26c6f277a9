"""An MCP server for tests; the first argument is how it behaves."""

import json
import os
import subprocess
import sys
import time

BEHAVIOUR = sys.argv[1] if len(sys.argv) > 1 else "good"
TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
TOOLS = [{"name": name, "description": f"The tool {name}.", "inputSchema": TEXT} for name in ("upper", "fail", "die")]
NAMES = ("sleep", "garbage", "ask", "environment", "ping", "notify", "log", "huge", "close", "orphan")
TOOLS += [{"name": name, "inputSchema": {"type": "object"}} for name in NAMES]


def send(message: object) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def result(id: object, value: object) -> None:
    send({"jsonrpc": "2.0", "id": id, "result": value})


def call(id: object, name: str, arguments: dict) -> None:
    match name:
        case "upper":
            result(id, {"content": [{"type": "text", "text": arguments["text"].upper()}]})
        case "fail":
            result(id, {"content": [{"type": "text", "text": "it is closed"}], "isError": True})
        case "die":
            print("out of luck", file=sys.stderr, flush=True)
            os._exit(3)
        case "sleep":
            time.sleep(1.5)
            result(id, {"content": [{"type": "text", "text": "late"}]})
        case "garbage":
            sys.stdout.write("Traceback: no JSON\n")
            sys.stdout.flush()
        case "ask":  # requests of the server, a notification and an answer to nothing come first
            send({"jsonrpc": "2.0", "id": "s1", "method": "ping"})
            send({"jsonrpc": "2.0", "id": id, "method": "sampling/createMessage", "params": {}})
            send({"jsonrpc": "2.0", "method": "notifications/message", "params": {}})
            send({"jsonrpc": "2.0", "id": 999, "result": {}})
            answers = [json.loads(sys.stdin.readline()) for _ in range(2)]
            parts = [{"type": "image", "data": "x"}, {"type": "text", "text": json.dumps(answers)}]
            result(id, {"content": parts})
        case "environment":
            result(id, {"content": [], "structuredContent": sorted(os.environ)})
        case "ping":  # without end, and reads nothing
            while True:
                send({"jsonrpc": "2.0", "id": "p", "method": "ping"})
        case "notify":
            while True:
                send({"jsonrpc": "2.0", "method": "notifications/message", "params": {}})
        case "log":  # more than a pipe holds, before it reads the next request
            result(id, {"content": []})
            sys.stdout.write("\n \n" * 2000)
            for _ in range(20):
                send({"jsonrpc": "2.0", "method": "notifications/message", "params": {"data": "x" * 10_000}})
        case "huge":  # a line that is too long
            send({"padding": "x" * (9 << 20)})
        case "close":  # its output, and lives
            os.close(1)
            time.sleep(60)
        case "orphan":  # a process that no signal to the server reaches, and that keeps its pipes open
            command = [sys.executable, "-c", "import time; time.sleep(60)"]
            result(id, {"content": [], "structuredContent": subprocess.Popen(command, start_new_session=True).pid})
        case "files.read" | "files_read" | "files/read":
            result(id, {"content": [{"type": "text", "text": name}]})


def main() -> None:
    if BEHAVIOUR == "silent":
        time.sleep(60)
    if BEHAVIOUR == "dead":
        sys.exit("no licence")
    if BEHAVIOUR == "noisy":
        print("Welcome!", flush=True)
    for line in sys.stdin:
        message = json.loads(line)
        match message["method"], message.get("params", {}):
            case "initialize", parameters:
                version = {"old": "2024-11-05", "future": "2099-01-01"}.get(BEHAVIOUR, parameters["protocolVersion"])
                capabilities = {"none": {}, "agreeing": True, "five": 5}.get(BEHAVIOUR, {"tools": {}})
                info = {"name": "fake", "version": "1"}
                result(message["id"], {"protocolVersion": version, "capabilities": capabilities, "serverInfo": info})
            case "tools/list", _ if BEHAVIOUR == "refusing":
                send({"jsonrpc": "2.0", "id": message["id"], "error": {"code": -1, "message": "not today"}})
            case "tools/list", _ if BEHAVIOUR == "nameless":
                result(message["id"], {"tools": [{"inputSchema": {}}]})
            case "tools/list", _ if BEHAVIOUR == "dotted":
                first = {"name": "files.read", "description": "\ud83d", "inputSchema": TEXT}
                others = [first | {"name": name} for name in ("files_read", "files/read")]
                result(message["id"], {"tools": [first, *others]})
            case "tools/list", _ if BEHAVIOUR == "huge":
                result(message["id"], {"tools": [], "padding": "x" * (5 << 20)})
            case "tools/list", _ if BEHAVIOUR == "endless":
                result(message["id"], {"tools": [], "nextCursor": "again"})
            case "tools/list", parameters:  # on two pages
                page = {"tools": TOOLS[2:]} if "cursor" in parameters else {"tools": TOOLS[:2], "nextCursor": "2"}
                result(message["id"], page)
            case "tools/call", parameters:
                call(message["id"], parameters["name"], parameters["arguments"])


main()
