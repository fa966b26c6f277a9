"""An engine and a lens without a model, with the real interface: every request gets the same reply."""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Unpack

import torch

from regard.engine.request import QueueFull, Request, RequestOptions, Sampling, Token
from regard.lens.attention_layers import AttentionLayer, Mixer
from regard.lens.detectors import KINDS, HeadScores
from regard.server.lens_thread import Lens
from regard.server.map_parts import Recording
from regard.text.tokenizer import Tokenizer


class FakeEngine:
    """Generates `reply` once, or without end if `repeat`. A step fails if the prompt contains the id `poison`."""

    capacity = 4096
    adapters = ()

    def __init__(self, tokenizer: Tokenizer, reply: str, repeat: bool = False, queue: int = 8, poison: int = -1):
        self.script = tokenizer.encode(reply)
        self.eos, self.vocab = tokenizer.eos, tokenizer.vocab_size
        self.model = SimpleNamespace(spec=SimpleNamespace(vocab=self.vocab))
        self.repeat, self.queue, self.poison = repeat, queue, poison
        self.active: list[Request] = []
        self.submitted: list[Request] = []
        self.cancelled = 0
        self.may_step = threading.Event()  # while it is cleared, steps wait
        self.may_step.set()
        self.step_seconds = 0.0
        self.clock = time.monotonic  # of deadlines
        self.rows = 64  # requests that get a token in a step

    @property
    def max_requests(self) -> int:
        return self.queue

    @property
    def idle(self) -> bool:
        return not self.active

    def submit(self, ids: Sequence[int], sampling: Sampling, **options: Unpack[RequestOptions]) -> Request:
        if len(self.active) >= self.queue:
            raise QueueFull(f"{self.queue} requests are waiting; try again later")
        if not all(0 <= id < self.vocab for id in ids):
            raise ValueError(f"an id is outside the vocabulary of {self.vocab}; encode with this model's tokenizer")
        seconds = options.pop("deadline", None)
        request = Request(tuple(ids), sampling, **options)
        request.deadline = None if seconds is None else self.clock() + seconds
        self.active.append(request)
        self.submitted.append(request)
        return request

    def cancel(self, request: Request) -> None:
        if request in self.active:
            self.active.remove(request)
            request.finish = "cancelled"
            self.cancelled += 1

    def step(self) -> list[tuple[Request, Token]]:
        self.may_step.wait()
        time.sleep(self.step_seconds)
        if any(self.poison in request.ids for request in self.active):
            raise RuntimeError("a secret address: 0xdeadbeef")
        for request in [r for r in self.active if r.deadline is not None and r.deadline <= self.clock()]:
            self.active.remove(request)
            request.finish = "timeout"
        return [(request, self.token(request)) for request in self.active[: self.rows]]

    def token(self, request: Request) -> Token:
        step = len(request.new)
        if step == 0 and (count := request.sampling.prompt_logprobs) is not None:
            request.prompt_logprobs = [Token(id, -0.5, ((id, -0.5),) * min(count, 1), None) for id in request.ids[1:]]
        end = step == len(self.script) and not self.repeat
        id = self.eos if end else self.script[step % len(self.script)]
        alternatives = [(other * 7 + 11 * step) % 256 + 5 for other in range(request.sampling.top_logprobs)]
        probability = 0.35 + 0.6 * math.sin(step * 1.7) ** 2
        top = tuple(
            [(id, math.log(probability))]
            + [(o, math.log((1 - probability) / 2 ** (i + 1))) for i, o in enumerate(alternatives)]
        )
        finish = "stop" if id in request.sampling.stop_ids else None
        if finish is None and step + 1 == request.sampling.max_new:
            finish = "length"
        token = Token(id, math.log(probability), top[: request.sampling.top_logprobs], finish, 1, entropy=2.0)
        request.add(token)
        if finish:
            self.active.remove(request)
        return token

    def metrics(self) -> dict[str, float]:
        finished = Counter(request.finish for request in self.submitted if request.finish)
        new_tokens = sum(len(request.new) for request in self.submitted)
        running = len(self.active[: self.rows])
        return {"running": running, "waiting": len(self.active) - running, "new_tokens": new_tokens, **finished}


HEADS = (4, 4, 0, 4)  # the third layer has no attention


class FakeRecording:
    """Causal maps: previous-token heads, first-token heads, and heads that match equal tokens."""

    nbytes = 1000

    def __init__(self, ids: Sequence[int], target: Sequence[int] = ()):
        self.ids = ids

    def weights(self, layer: int, heads: slice = slice(None), rows: slice = slice(None)) -> torch.Tensor | None:
        length, generator = len(self.ids), torch.Generator().manual_seed(layer)
        distance = torch.arange(length)[:, None] - torch.arange(length)  # (L, L)
        equal = torch.tensor(self.ids)[:, None] == torch.tensor(self.ids)
        patterns = (-(distance - 1.0).abs(), -torch.arange(length) / 2.0 + 0 * distance, 4.0 * equal, -0.1 * distance)
        if HEADS[layer] == 0:
            return None
        noise = torch.randn(HEADS[layer], length, length, generator=generator)
        scores = torch.stack(patterns)[: HEADS[layer]] * 1.5 + noise  # (H, L, L)
        return scores.masked_fill(distance < 0, -torch.inf).softmax(-1)[heads, rows]


def fake_lens(record: Callable[..., Recording] = FakeRecording, vocab: int = 340) -> Lens:
    attention = [Mixer("attention", heads, kv_heads=heads, causal=True) for heads in HEADS]
    attention[2] = Mixer("linear attention", 0, reason="it has no softmax")
    layers = tuple(AttentionLayer("layers", i, (mixer,)) for i, mixer in enumerate(attention))
    return Lens(record, layers, vocab, fake_scores)


def fake_scores() -> HeadScores:
    """The heads of FakeRecording; the first one of every layer attends to the previous token."""
    scores = {kind: [torch.full((count,), 0.05) if count else None for count in HEADS] for kind in KINDS}
    for head, kind in enumerate(("previous token", "first token", "duplicate token")):
        for layer in scores[kind]:
            if layer is not None:
                layer[head] = 0.8
    return HeadScores(scores, dict.fromkeys(KINDS, 0.05))


def fake_embeddings(texts: Sequence[str]) -> torch.Tensor:
    """(N, 4) unit vectors."""
    return torch.nn.functional.normalize(torch.tensor([[1.0, len(text), 2, 3] for text in texts]), dim=-1)
