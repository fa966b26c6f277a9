"""The log-likelihoods and greedy outputs of a model behind an OpenAI-compatible server.

Prompts are sent to `/v1/completions` as token ids. Likelihoods are the log-probabilities of the echoed prompt, of which
one new token is dropped: many servers refuse max_tokens=0. The ids come from a tokenizer on this machine, or from the
server's `/tokenize`, which regard and vLLM have.
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from regard.engine.inputs import CAPACITY
from regard.evals.scoring import Advance, ChatTurns, Likelihood, ScoredRow, encode_answered
from regard.text.chat import encode_chat
from regard.text.tokenizer import Tokenizer

TIMEOUT = 600.0  # seconds
NO_TOKENIZE = "it has no /tokenize; name the model's tokenizer by --tokenizer"


class RemoteModel:
    """url: with or without /v1. model: None is the first that the server lists. window: at most the server's."""

    def __init__(
        self,
        url: str,
        model: str | None = None,
        key: str | None = None,
        tokenizer: Tokenizer | None = None,
        rows: int = 16,
        window: int | None = None,
    ):
        self.name, self.tokenizer, self.rows = url.rstrip("/").removesuffix("/v1"), tokenizer, rows
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.client = httpx.Client(base_url=self.name, headers=headers, timeout=TIMEOUT)
        weakref.finalize(self, self.client.close)
        self.known: dict[str, list[int]] = {}  # ids of texts
        cards = self.request("GET", "/v1/models")["data"]
        card = next((card for card in cards if model in (None, card["id"])), None)
        if card is None:
            names = ", ".join(card["id"] for card in cards) or "none"
            raise ValueError(f"{self.name} has no model {model!r}; it has {names}")
        self.model = card["id"]
        limit = self.limit(card) - 2  # the last token of a row, and a new one
        if window is not None and not 1 <= window <= limit:
            raise ValueError(f"window={window} is not between 1 and the {limit} tokens that {self.name} reads")
        self.window: int = window or limit
        self.start_id = self.find_start()

    def limit(self, card: Mapping[str, Any]) -> int:
        """Tokens of a prompt with its output."""
        if self.tokenizer is None:
            return self.tokenize(prompt="a")["max_model_len"]
        return card.get("max_model_len") or CAPACITY

    def find_start(self) -> int | None:
        if self.tokenizer is not None:
            return self.tokenizer.start_id
        response = self.client.get("/regard/model", params={"model": self.model})  # other servers have no such route
        return response.json().get("start_id") if response.status_code == 200 else None

    def encode(self, text: str) -> list[int]:
        if self.tokenizer is not None:
            return [*self.tokenizer.prefix_ids, *self.tokenizer.encode(text)]
        if text not in self.known:
            self.known[text] = self.tokenize(prompt=text)["tokens"]
        return self.known[text]

    def encode_chat(self, messages: ChatTurns) -> list[int]:
        if self.tokenizer is not None:
            return encode_chat(self.tokenizer, [dict(message) for message in messages])
        return self.tokenize(messages=list(messages))["tokens"]

    def encode_answered(self, messages: ChatTurns) -> list[int]:
        if self.tokenizer is None:
            raise ValueError(
                "choices in a chat template need to know its special tokens; name the tokenizer by --tokenizer"
            )
        return encode_answered(self.tokenizer, messages)

    def score(self, rows: Sequence[ScoredRow], on_progress: Advance = lambda done: None) -> list[Likelihood]:
        found: list[Likelihood] = []
        for first in range(0, len(rows), self.rows):
            batch = rows[first : first + self.rows]
            choices = self.completions([row.ids for row in batch], max_tokens=1, logprobs=1, echo=True)
            found += [self.likelihood(row, choice) for row, choice in zip(batch, choices, strict=True)]
            on_progress(len(batch))
        return found

    def likelihood(self, row: ScoredRow, choice: Mapping[str, Any]) -> Likelihood:
        listed = choice.get("logprobs") or {}
        logprobs, tops = (listed.get(name) or [] for name in ("token_logprobs", "top_logprobs"))
        if len(logprobs) < len(row.ids) or len(tops) < len(row.ids):
            raise ValueError(
                f"{self.name} does not return the log-probabilities of an echoed prompt (echo with logprobs), which "
                "likelihoods need; its tasks of kind generation work"
            )
        span = slice(row.start, len(row.ids))
        greedy = all(own >= max(top.values()) for own, top in zip(logprobs[span], tops[span], strict=True))
        return Likelihood(sum(logprobs[span]), greedy, len(row.ids) - row.start)

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        max_new: int,
        stop: Sequence[str],
        on_progress: Advance = lambda done: None,
    ) -> list[str]:
        texts: list[str] = []
        for first in range(0, len(prompts), self.rows):
            batch = prompts[first : first + self.rows]
            options = {"stop": list(stop)} if stop else {}
            texts += [choice["text"] for choice in self.completions(batch, max_tokens=max_new, **options)]
            on_progress(len(batch))
        return texts

    def completions(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[dict[str, Any]]:
        """The choices, in the order of the prompts."""
        body = {"model": self.model, "prompt": [list(ids) for ids in prompts], "temperature": 0, **options}
        choices = self.request("POST", "/v1/completions", body)["choices"]
        return sorted(choices, key=lambda choice: choice["index"])

    def tokenize(self, **body: Any) -> dict[str, Any]:
        return self.request("POST", "/tokenize", {"model": self.model, **body}, missing=NO_TOKENIZE)

    def request(
        self, method: str, path: str, body: dict[str, Any] | None = None, missing: str | None = None
    ) -> dict[str, Any]:
        try:
            response = self.client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise ValueError(f"{self.name} does not answer: {error}; check the address") from None
        if response.status_code == 404 and missing is not None:
            raise ValueError(f"{self.name}: {missing}")
        if response.status_code != 200:
            raise ValueError(f"{self.name}{path} answers {response.status_code}: {response.text[:300]}")
        try:
            return response.json()
        except ValueError:
            raise ValueError(f"{self.name}{path} is no OpenAI-compatible server: {response.text[:80]!r}") from None
