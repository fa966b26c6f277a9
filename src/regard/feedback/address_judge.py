"""A judge behind an OpenAI-compatible address on this machine, such as that of `regard serve`.

Only loopback addresses are accepted, also as what a name resolves to; proxies of the environment are not used and
redirects are not followed. So a prompt never leaves the machine. The verdict is the letter that the reply starts with;
its log-odds come from `logprobs` of the chat completions, if the server sends them.
"""

import ipaddress
import json
import math
import socket
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from string import whitespace
from threading import Event
from typing import Any
from urllib.parse import urlsplit

from regard.feedback.judge import LETTERS, LIMIT

AT_ONCE = 8  # requests
TIMEOUT = 600.0  # seconds per request, with the attempts that the server refuses because of its load
WAIT, MIN_WAIT, MAX_WAIT = 0.5, 0.1, 5.0  # seconds between two of them, and the bounds of Retry-After
MAX_CONTENT = 4 << 20  # bytes of a response
MAX_NEW = 8  # tokens: the letter, and marks before it
ALTERNATIVES = 20  # most likely tokens, as many as OpenAI's API has
BUSY = (429, 503)
MARKS = f"{whitespace}.,:;*()[]\"'"  # that may stand around the letter


def is_address(name: str) -> bool:
    return "://" in name


def check_address(address: str) -> tuple[str, int, str]:
    """Host, port and path of the API. Raises ValueError for an address that is not on this machine."""
    try:
        parts = urlsplit(address)
        host, port = parts.hostname or "", 80 if parts.port is None else parts.port
    except ValueError as error:
        raise ValueError(f"the judge's address {address!r} is not valid: {error}") from None
    unknown = "@" in parts.netloc or parts.query or parts.fragment or not parts.path.isascii()
    if parts.scheme != "http" or port == 0 or unknown:
        raise ValueError(f"the judge's address {address!r} must have the form http://127.0.0.1:8000")
    if not is_loopback(host) and host != "localhost":
        raise ValueError(
            f"the judge's address {address!r} is not on this machine; give one of localhost, 127.0.0.1 or [::1]: "
            "prompts are not sent elsewhere"
        )
    path = parts.path.rstrip("/").removesuffix("/chat/completions").removesuffix("/v1")
    return host, port, f"{path}/v1"


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


class AddressJudge:
    """name: the model to ask, if the server has more than one."""

    def __init__(self, address: str, name: str | None = None):
        self.address = address
        self.host, self.port, self.path = check_address(address)
        self.stopped, self.open = Event(), set[socket.socket]()  # of the requests in other threads
        self.name = self.find_model(name)

    def find_model(self, name: str | None) -> str:
        listed = self.send("GET", "/models").get("data")
        entries = [entry.get("id") for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
        names = [entry for entry in entries if isinstance(entry, str)]
        if not names:
            raise ValueError(f"{self.address} lists no models at {self.path}/models; start a server with a model there")
        if name is None and len(names) == 1:
            return names[0]
        if name is None or name not in names:
            wrong = "serves several models" if name is None else f"serves no model {name!r}"
            raise ValueError(f"{self.address} {wrong}; choose one with --judge-name: {', '.join(names)}")
        return name

    def ask(self, questions: Sequence[str]) -> list[float | None]:
        self.stopped.clear()
        pool = ThreadPoolExecutor(min(AT_ONCE, max(1, len(questions))))
        try:
            futures = [pool.submit(self.ask_one, question) for question in questions]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            return [future.result() for future in futures if future in done]  # all, or the first error is raised
        except BaseException:
            self.stop()
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def stop(self) -> None:
        """End the requests of other threads, also those that wait for the server."""
        self.stopped.set()
        for stream in list(self.open):
            with suppress(OSError):  # it is closed already
                stream.shutdown(socket.SHUT_RDWR)

    def ask_one(self, question: str) -> float | None:
        body = {
            "model": self.name,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": MAX_NEW,
            "logprobs": True,
            "top_logprobs": ALTERNATIVES,
        }
        return log_odds_of(self.send("POST", "/chat/completions", body))

    def send(self, method: str, route: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        deadline = time.monotonic() + TIMEOUT
        while True:
            status, pause, content = self.send_once(method, route, body, deadline)
            if status not in BUSY or time.monotonic() + pause > deadline or self.stopped.wait(pause):
                break
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError):
            answer = None
        if status != 200 or not isinstance(answer, dict):
            error = answer.get("error") if isinstance(answer, dict) else None
            reason = error.get("message") if isinstance(error, dict) else content[:200].decode("utf-8", "replace")
            raise ValueError(f"the judge at {self.address} answered {route} with status {status}: {reason!s:.1000}")
        return answer

    def send_once(
        self, method: str, route: str, body: Mapping[str, Any] | None, deadline: float
    ) -> tuple[int, float, bytes]:
        """Status, seconds until the next attempt if the server is busy, and the content."""
        try:
            with self.connect(deadline) as connection:
                content = None if body is None else json.dumps(body).encode()
                connection.request(method, self.path + route, content, {"content-type": "application/json"})
                with connection.getresponse() as response:  # an open one keeps the socket after the connection's end
                    pause = response.headers.get("retry-after", "")
                    seconds = min(MAX_WAIT, max(MIN_WAIT, float(pause))) if pause.isdecimal() else WAIT
                    return response.status, seconds, read_content(response, deadline)
        except (OSError, HTTPException) as error:
            raise ValueError(
                f"the judge at {self.address} cannot be reached ({error or type(error).__name__}); start a server "
                "there, for example with regard serve MODEL"
            ) from error

    @contextmanager
    def connect(self, deadline: float) -> Generator[HTTPConnection]:
        """A connection to this machine, which `stop` ends."""
        connection = HTTPConnection(self.host, self.port, timeout=max(MIN_WAIT, deadline - time.monotonic()))
        connection.connect()
        stream = connection.sock
        self.open.add(stream)
        try:
            if not is_loopback(peer := stream.getpeername()[0]):
                raise ValueError(
                    f"the judge's address {self.address} leads to {peer}, which is not on this machine: prompts are "
                    "not sent there; use 127.0.0.1 or [::1] instead of the name"
                )
            if self.stopped.is_set():
                raise ValueError("another request has failed")
            yield connection
        finally:
            self.open.discard(stream)
            connection.close()


def read_content(response: HTTPResponse, deadline: float) -> bytes:
    content = bytearray()
    while chunk := response.read1(1 << 16):
        content += chunk
        if len(content) > MAX_CONTENT:
            raise ValueError(f"the judge sent a response of more than {MAX_CONTENT >> 20} MiB; is it a language model?")
        if time.monotonic() > deadline:
            raise TimeoutError("timed out")
    return bytes(content)


def log_odds_of(answer: Mapping[str, Any]) -> float | None:
    """The log-odds of the letter that is the first token of a chat completion, or without tokens its first word.

    Tokens of spaces and marks before it do not count. None if the first one is not a letter.
    """
    try:
        (choice, *_) = answer["choices"]
        words = [{"token": word} for word in (choice["message"].get("content") or "").split()]
        tokens = (choice.get("logprobs") or {}).get("content") or words
        token: dict[str, Any] = next((each for each in tokens if each["token"].strip(MARKS)), {"token": ""})
        if (letter := token["token"].strip(MARKS)) not in LETTERS:
            return None
        others = token.get("top_logprobs") or []
        logprobs = {other["token"]: float(other["logprob"]) for other in (*others, token)} if others else {}
        if len(logprobs) < 2:  # the server sends no alternatives
            return LIMIT if letter == LETTERS[0] else -LIMIT
        return letter_odds(logprobs)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ValueError(f"the judge's answer is not a chat completion ({error}): {answer!r:.200}") from error


def letter_odds(logprobs: Mapping[str, float]) -> float:
    """Of the tokens that the server lists. Tokens that differ only in the marks around the letter count together.

    A letter that is not listed is at most as likely as the least likely token that is.
    """
    for text, logprob in logprobs.items():
        if not logprob < 0.01:  # 0 with a rounding error; NaN is not either
            raise ValueError(f"{logprob} is not a log-probability, of {text!r:.40}")
    totals = [
        sum(math.exp(logprob) for text, logprob in logprobs.items() if text.strip(MARKS) == letter)
        for letter in LETTERS
    ]
    least = math.exp(min(logprobs.values()))
    first, second = (math.log(max(total or least, 1e-300)) for total in totals)
    return first - second
