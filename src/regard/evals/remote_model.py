"""The log-likelihoods and greedy outputs of a model behind an OpenAI-compatible server.

Prompts are sent to `/v1/completions` as token ids. Likelihoods are the log-probabilities of the echoed prompt, of which
one new token is dropped: many servers refuse max_tokens=0. The ids come from a tokenizer on this machine, or from the
server's `/tokenize`, which regard and vLLM have.
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from regard.evals.scoring import Advance, ChatTurns, Likelihood, ScoredRow, encode_answered, in_batches
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
        try:
            self.client = httpx.Client(base_url=self.name, headers=headers, timeout=TIMEOUT)
        except httpx.InvalidURL as error:
            raise ValueError(f"{url!r} is not an address ({error}); give one such as http://127.0.0.1:8000") from None
        weakref.finalize(self, self.client.close)
        self.known: dict[str, list[int]] = {}  # ids of texts
        listed = self.request("GET", "/v1/models")
        cards = listed.get("data")
        if not isinstance(cards, list) or not all(isinstance(c, dict) and isinstance(c.get("id"), str) for c in cards):
            raise self.fault("/v1/models", listed, "a list `data` of models with an `id`")
        card = next((card for card in cards if model in (None, card["id"])), None)
        if card is None:
            names = ", ".join(card["id"] for card in cards) or "none"
            raise ValueError(f"{self.name} has no model {model!r}; it has {names}")
        self.model = card["id"]
        most = self.most_tokens(card)
        limit = window if most is None else most - 2  # the last token of a row, and a new one
        if limit is None:
            raise ValueError(f"{self.name} does not say how many tokens it reads; give --context")
        if window is not None and not 1 <= window <= limit:
            raise ValueError(f"window={window} is not between 1 and the {limit} tokens that {self.name} reads")
        self.window: int = limit if window is None else window
        self.start_id = self.find_start()

    def most_tokens(self, card: Mapping[str, Any]) -> int | None:
        """Of a prompt with its output; None if the server does not say."""
        path, found = "/v1/models", card
        if self.tokenizer is None:
            path, found = "/tokenize", self.request("POST", "/tokenize", self.body(prompt="a"), NO_TOKENIZE)
        most = found.get("max_model_len")
        if most is not None and (type(most) is not int or most < 3):
            raise self.fault(path, found, "an answer with a `max_model_len` of at least 3 tokens")
        return most

    def find_start(self) -> int | None:
        if self.tokenizer is not None:
            return self.tokenizer.start_id
        response = self.send("GET", "/regard/model", params={"model": self.model})
        if response.status_code in (404, 405):  # other servers have no such route
            return None
        start = self.answer_of(response, "/regard/model").get("start_id")
        if start is not None and type(start) is not int:
            raise self.fault("/regard/model", start, "a token id as `start_id`")
        return start

    def encode(self, text: str) -> list[int]:
        if self.tokenizer is not None:
            return [*self.tokenizer.prefix_ids, *self.tokenizer.encode(text)]
        if text not in self.known:
            self.known[text] = self.tokenize(prompt=text)
        return self.known[text]

    def encode_chat(self, messages: ChatTurns) -> list[int]:
        if self.tokenizer is not None:
            return encode_chat(self.tokenizer, [dict(message) for message in messages])
        return self.tokenize(messages=list(messages))

    def encode_answered(self, messages: ChatTurns) -> list[int]:
        if self.tokenizer is None:
            raise ValueError(
                "choices in a chat template need to know its special tokens; name the tokenizer by --tokenizer"
            )
        return encode_answered(self.tokenizer, messages)

    def score(self, rows: Sequence[ScoredRow], on_progress: Advance = lambda done: None) -> list[Likelihood]:
        def score_batch(batch: Sequence[ScoredRow]) -> list[Likelihood]:
            choices = self.completions([row.ids for row in batch], max_tokens=1, logprobs=1, echo=True)
            return [self.likelihood(row, choice) for row, choice in zip(batch, choices, strict=True)]

        return in_batches(score_batch, rows, self.rows, on_progress)

    def likelihood(self, row: ScoredRow, choice: Mapping[str, Any]) -> Likelihood:
        span = range(row.start, len(row.ids))
        try:
            logprobs, tops = (choice["logprobs"][name] for name in ("token_logprobs", "top_logprobs"))
            greedy = all(logprobs[i] >= max(tops[i].values()) for i in span)
            return Likelihood(sum(logprobs[i] for i in span), greedy, len(span))
        except (LookupError, TypeError, AttributeError, ValueError):
            raise ValueError(
                f"{self.name} does not return the log-probabilities of an echoed prompt (echo with logprobs), which "
                "likelihoods need; its tasks of kind generation work"
            ) from None

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        max_new: int,
        stop: Sequence[str],
        on_progress: Advance = lambda done: None,
    ) -> list[str]:
        options = {"stop": list(stop)} if stop else {}

        def complete_batch(batch: Sequence[Sequence[int]]) -> list[str]:
            return [choice["text"] for choice in self.completions(batch, max_tokens=max_new, **options)]

        return in_batches(complete_batch, prompts, self.rows, on_progress)

    def completions(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[dict[str, Any]]:
        """The choices, in the order of the prompts."""
        body = self.body(prompt=[list(ids) for ids in prompts], temperature=0, **options)
        found = self.request("POST", "/v1/completions", body)
        try:
            choices = {choice["index"]: choice for choice in found["choices"] if isinstance(choice["text"], str)}
            return [choices[i] for i in range(len(prompts))]
        except (LookupError, TypeError):
            expected = f"a list `choices` with `index` and `text` for each of {len(prompts)} prompts"
            raise self.fault("/v1/completions", found, expected) from None

    def tokenize(self, **options: Any) -> list[int]:
        found = self.request("POST", "/tokenize", self.body(**options), NO_TOKENIZE)
        ids = found.get("tokens")
        if not isinstance(ids, list) or not all(type(each) is int for each in ids):
            raise self.fault("/tokenize", found, "an answer with a list `tokens` of ids")
        return ids

    def body(self, **options: Any) -> dict[str, Any]:
        return {"model": self.model, **options}

    def request(
        self, method: str, path: str, body: dict[str, Any] | None = None, missing: str | None = None
    ) -> dict[str, Any]:
        response = self.send(method, path, json=body)
        if response.status_code == 404 and missing is not None:
            raise ValueError(f"{self.name}: {missing}")
        return self.answer_of(response, path)

    def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            return self.client.request(method, path, **options)
        except httpx.HTTPError as error:
            raise ValueError(f"{self.name} does not answer: {error}; check the address") from None

    def answer_of(self, response: httpx.Response, path: str) -> dict[str, Any]:
        if response.status_code != 200:
            raise ValueError(f"{self.name}{path} answers {response.status_code}: {response.text[:300]}")
        try:
            found = response.json()
        except (ValueError, RecursionError):
            found = response.text
        if not isinstance(found, dict):
            raise self.fault(path, found, "a JSON object")
        return found

    def fault(self, path: str, found: Any, expected: str) -> ValueError:
        return ValueError(f"{self.name}{path} answers {found!r:.80}, not {expected}; check the address")
