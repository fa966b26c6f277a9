"""A judge behind an OpenAI-compatible address on this machine, such as that of `regard serve`.

Only loopback addresses are accepted, proxies of the environment are not used and redirects are not followed, so a
prompt never leaves the machine. The log-odds come from `logprobs` of the chat completions; without them, the letter of
the reply is the verdict.
"""

import ipaddress
import json
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

from regard.feedback.judge import LETTERS, LIMIT

AT_ONCE = 8  # requests
TIMEOUT = 600  # seconds per request
ATTEMPTS = 60  # of a request that the server refuses because of its load
MAX_WAIT = 5.0  # seconds between two of them
MAX_NEW = 8  # tokens, in which the letter must occur
ALTERNATIVES = 20  # most likely tokens, as many as OpenAI's API has
BUSY = (429, 503)


def is_address(name: str) -> bool:
    return "://" in name


def check_address(address: str) -> tuple[str, int, str]:
    """Host, port and path of the API. Raises ValueError for an address that is not on this machine."""
    try:
        parts = urlsplit(address)
        host, port = parts.hostname or "", parts.port or 80
    except ValueError as error:
        raise ValueError(f"the judge's address {address!r} is not valid: {error}") from None
    if parts.scheme != "http" or parts.username or parts.query or parts.fragment:
        raise ValueError(f"the judge's address {address!r} must have the form http://127.0.0.1:8000")
    if not is_loopback(host):
        raise ValueError(
            f"the judge's address {address!r} is not on this machine; give one of localhost, 127.0.0.1 or [::1]: "
            "prompts are not sent elsewhere"
        )
    path = parts.path.rstrip("/").removesuffix("/chat/completions").removesuffix("/v1")
    return host, port, f"{path}/v1"


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # another name
        return False


class AddressJudge:
    """name: the model to ask, if the server has more than one."""

    def __init__(self, address: str, name: str | None = None):
        self.address = address
        self.host, self.port, self.path = check_address(address)
        self.name = self.find_model(name)

    def find_model(self, name: str | None) -> str:
        listed = self.send("GET", "/models").get("data")
        names = [str(entry.get("id")) for entry in listed] if isinstance(listed, list) else []
        if name is None and len(names) == 1:
            return names[0]
        if name is None or name not in names:
            wrong = "serves several models" if name is None else f"serves no model {name!r}"
            raise ValueError(f"{self.address} {wrong}; choose one with --judge-name: {', '.join(names) or 'none'}")
        return name

    def ask(self, questions: Sequence[str]) -> list[float | None]:
        pool = ThreadPoolExecutor(min(AT_ONCE, max(1, len(questions))))
        try:
            return list(pool.map(self.ask_one, questions))
        finally:
            pool.shutdown(cancel_futures=True)  # if one request has failed, the others are not sent

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
        for _ in range(ATTEMPTS):
            status, wait, content = self.send_once(method, route, body)
            if status not in BUSY:
                break
            time.sleep(min(MAX_WAIT, wait))
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError):
            answer = None
        if status != 200 or not isinstance(answer, dict):
            error = answer.get("error") if isinstance(answer, dict) else None
            reason = error.get("message") if isinstance(error, dict) else content[:200].decode("utf-8", "replace")
            raise ValueError(f"the judge at {self.address} answered {route} with status {status}: {reason}")
        return answer

    def send_once(self, method: str, route: str, body: Mapping[str, Any] | None) -> tuple[int, float, bytes]:
        """Status, seconds until the next attempt if the server is busy, and the content."""
        connection = HTTPConnection(self.host, self.port, timeout=TIMEOUT)
        try:
            content = None if body is None else json.dumps(body).encode()
            connection.request(method, self.path + route, content, {"content-type": "application/json"})
            response = connection.getresponse()
            wait = response.headers.get("retry-after", "")
            return response.status, float(wait) if wait.isdigit() else 0.5, response.read()
        except (OSError, HTTPException) as error:
            raise ValueError(
                f"the judge at {self.address} cannot be reached ({error or type(error).__name__}); start a server "
                "there, for example with regard serve MODEL"
            ) from error
        finally:
            connection.close()


def log_odds_of(answer: Mapping[str, Any]) -> float | None:
    """The log-odds of a chat completion: of the first token that is a letter, else of the letter of its text."""
    try:
        (choice, *_) = answer["choices"]
        tokens = ((choice.get("logprobs") or {}).get("content")) or []
        for token in tokens:
            if token["token"].strip() in LETTERS:
                return letter_odds([token, *(token.get("top_logprobs") or [])])
        words = (choice["message"].get("content") or "").strip(" \n\t.*\"'():").split()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"the judge's answer is not a chat completion: {answer!r:.200}") from error
    letter = words[0].strip(".,:;*()\"'") if words else ""
    return {LETTERS[0]: LIMIT, LETTERS[1]: -LIMIT}.get(letter)


def letter_odds(tokens: Sequence[Mapping[str, Any]]) -> float:
    """Tokens that differ only in the space before the letter count together.

    A letter that is not listed is at most as likely as the least likely token that is.
    """
    listed = {token["token"]: float(token["logprob"]) for token in tokens}
    totals = [
        sum(math.exp(logprob) for text, logprob in listed.items() if text.strip() == letter) for letter in LETTERS
    ]
    if len(listed) == 1:  # no alternatives: the server sends only the letter
        return LIMIT if totals[0] else -LIMIT
    least = math.exp(min(listed.values()))
    first, second = (math.log(max(total or least, 1e-300)) for total in totals)
    return first - second
