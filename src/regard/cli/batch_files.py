"""The files of `regard batch`, in the format of OpenAI's Batch API: one JSON object per line.

    in:   {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {…}}
    out:  {"id": "batch_req_…", "custom_id": "1", "error": null,
           "response": {"status_code": 200, "request_id": "…", "body": {…}}}

Lines of the output are appended in the order in which requests finish. After an interruption the output has a prefix of
complete lines, and perhaps a torn one, which is removed.
"""

import secrets
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from regard.data.appended_lines import AppendedLines, parse_json

ID = "batch_req_"  # before the random part


class BatchRequest(NamedTuple):
    custom_id: str
    method: Any
    url: Any
    body: Any


def read_requests(path: Path) -> list[BatchRequest]:
    """All requests. Raises ValueError for a line that a result could not be assigned to."""
    requests: dict[str, BatchRequest] = {}
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            entry = parse_json(line)
            custom_id = entry.get("custom_id") if isinstance(entry, dict) else None
            if not isinstance(entry, dict) or not isinstance(custom_id, str):
                raise ValueError(f"{path}, line {number}: not a JSON object with a string custom_id; correct this line")
            if custom_id in requests:
                raise ValueError(f"{path}, line {number}: custom_id {custom_id!r} occurs before; make it unique")
            if unknown := sorted(entry.keys() - {"custom_id", "method", "url", "body"}):
                raise ValueError(f"{path}, line {number}: unknown field {unknown[0]!r}; remove it")
            requests[custom_id] = BatchRequest(custom_id, entry.get("method"), entry.get("url"), entry.get("body"))
    if not requests:
        raise ValueError(f"{path} has no requests; write one JSON object per line")
    return list(requests.values())


class BatchOutput:
    """The output file, locked while it is open. `done` are the custom_ids that it had before, `failed` those of all
    requests in it that failed."""

    def __init__(self, path: Path, known: set[str]):
        self.failed: list[str] = []
        self.lines = AppendedLines(path)
        try:
            self.done = self.read_done(known)
        except ValueError:
            self.lines.stream.close()
            raise

    def __enter__(self) -> "BatchOutput":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.lines.__exit__(kind, error, traceback)

    def read_done(self, known: set[str]) -> set[str]:
        done = set[str]()
        for number, entry in self.lines.entries([f'{{"id": "{ID}'.encode()]):
            custom_id = entry.get("custom_id") if isinstance(entry, dict) else None
            if custom_id not in known:
                raise ValueError(
                    f"{self.lines.path}, line {number}: not the result of a request of the input; choose another "
                    "output file"
                )
            done.add(custom_id)
            self.note(custom_id, entry.get("response"))
        return done

    def note(self, custom_id: str, response: Any) -> None:
        if not isinstance(response, dict) or response.get("status_code") != 200:
            self.failed.append(custom_id)

    def write(self, custom_id: str, status: int, request_id: str | None, body: Any) -> None:
        response = {"status_code": status, "request_id": request_id, "body": body}
        id = f"{ID}{secrets.token_hex(12)}"
        self.lines.append({"id": id, "custom_id": custom_id, "response": response, "error": None})
        self.note(custom_id, response)
