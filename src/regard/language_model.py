"""A model with its tokenizer, for use from Python in one line.

    llm = regard.load("smollm2")
    llm.generate("The three primary colours are")
    llm.chat([{"role": "user", "content": "Name a primary colour."}])
    for text in llm.stream("Once upon a time"): print(text, end="")
    regard.load("minilm").embed(["a cat", "a kitten"])

It connects what can be used separately as well: `model` (an nn.Module), `tokenizer` and `engine`.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.checkpoint import model_folder
from regard.engine.engine import Engine
from regard.engine.inputs import pad_ids
from regard.engine.request import GenerationError, Request, Sampling, Token
from regard.find_model import find_model
from regard.models.decoder import DecoderModule
from regard.models.encoder import EncoderModule
from regard.models.heads import Pooled
from regard.text.chat import encode_chat
from regard.text.detokenizer import TextStream
from regard.text.tokenizer import Tokenizer
from regard.training.run import Run

ChatMessages = Sequence[Mapping[str, Any]]  # [{"role": "user", "content": "…"}, …]
EMBED_BATCH = 32


class SamplingOptions(TypedDict, total=False):
    """Fields of Sampling; see there."""

    max_new: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None


class LanguageModel:
    def __init__(self, model: nn.Module, tokenizer: Tokenizer, context: int | None = None, rows: int = 8):
        """context: maximum tokens of prompt and answer; None: the model's own. rows: prompts generated at once."""
        self.model: Any = model.eval()
        self.tokenizer = tokenizer
        self.context, self.rows = context, rows

    @cached_property
    def engine(self) -> Engine:
        if not isinstance(self.model, DecoderModule):
            raise ValueError(f"this model is of kind {self.model.spec.kind} and does not generate text; use a decoder")
        return Engine(self.model, rows=self.rows, capacity=self.context)

    def generate(
        self, prompt: str | Sequence[str], *, stop: Sequence[str] = (), **sampling: Unpack[SamplingOptions]
    ) -> Any:
        """The continuation of a prompt, without it; for several prompts a list, generated together.

        stop: strings that end the text before them. The other options are the fields of `Sampling`.
        """
        prompts = [self.encode(text) for text in ([prompt] if isinstance(prompt, str) else prompt)]
        size, texts = self.engine.max_requests, []
        for start in range(0, len(prompts), size):
            texts += self.generate_together(prompts[start : start + size], stop, sampling)
        return texts[0] if isinstance(prompt, str) else texts

    def generate_together(self, prompts: list[list[int]], stop: Sequence[str], options: SamplingOptions) -> list[str]:
        """The continuations of prompts that the engine can hold at once. If one fails, none stays in the engine."""
        requests: list[Request] = []
        try:
            for ids in prompts:
                requests.append(self.engine.submit(ids, self.sampling(options)))
            streams = [self.run(request, TextStream(self.tokenizer, stop, request.ids)) for request in requests]
            return ["".join(text for _, text in stream) for stream in streams]
        finally:
            for request in requests:
                self.engine.cancel(request)

    def chat(
        self, messages: str | ChatMessages, *, stop: Sequence[str] = (), **sampling: Unpack[SamplingOptions]
    ) -> str:
        """The answer to a conversation in the model's chat template; a string is one message of the user."""
        return "".join(text for _, text in self.submit(self.encode_chat(messages), stop, False, sampling))

    def stream(
        self, prompt: str | ChatMessages, *, stop: Sequence[str] = (), **sampling: Unpack[SamplingOptions]
    ) -> Iterator[str]:
        """The pieces of text as they are generated: the continuation of a string, or the answer to messages."""
        for _, text in self.stream_tokens(prompt, stop=stop, **sampling):
            if text:
                yield text

    def stream_tokens(
        self, prompt: str | ChatMessages, *, stop: Sequence[str] = (), **sampling: Unpack[SamplingOptions]
    ) -> "Iterator[tuple[Token, str]]":
        """Every token with the text that it completes, which is often empty."""
        completes = isinstance(prompt, str)
        ids = self.encode(prompt) if isinstance(prompt, str) else self.encode_chat(prompt)
        return self.submit(ids, stop, completes, sampling)

    @torch.inference_mode()
    def embed(self, texts: str | Sequence[str]) -> Tensor:
        """(N, D) unit vectors, one per text; for a single string (D,). Longer texts are cut at the model's context.

        An encoder embeds with its pooling head, or by the mean of its hidden states if it has no head. A decoder embeds
        by the mean of the hidden states that its head reads.
        """
        if not isinstance(self.model, EncoderModule | DecoderModule):
            raise ValueError(f"this model is of kind {self.model.spec.kind}; only encoders and decoders embed texts")
        several = [texts] if isinstance(texts, str) else list(texts)
        rows = [self.truncate(self.tokenizer.encode_with_special_tokens(text)) for text in several]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))  # similar lengths together: little padding
        vectors = {}
        for start in range(0, len(rows), EMBED_BATCH):
            batch = order[start : start + EMBED_BATCH]
            vectors |= dict(zip(batch, self.embed_batch([rows[i] for i in batch]), strict=True))
        if isinstance(texts, str):
            return vectors[0]
        return torch.stack([vectors[i] for i in range(len(rows))]) if rows else torch.empty(0)

    def embed_batch(self, rows: list[list[int]]) -> Tensor:
        if min(map(len, rows)) == 0:
            raise ValueError("a text has no tokens; leave out empty texts")
        tokens, layout = pad_ids(rows, next(self.model.parameters()).device)
        if isinstance(self.model, EncoderModule):
            head = self.model.spec.head
            if isinstance(head, Pooled):
                return F.normalize(self.model(tokens, layout), dim=-1)
            if head is not None:
                raise ValueError(f"this encoder ends in {head.kind}, which gives no embedding; use one without a head")
            hidden = self.model(tokens, layout)
        else:
            hidden = self.model.hidden(tokens, layout)
        if layout.valid is not None:
            hidden = hidden * layout.valid.unsqueeze(-1)
        return F.normalize(hidden.sum(1), dim=-1)  # (B, D); the mean's scale is lost in the norm

    def truncate(self, ids: list[int]) -> list[int]:
        """The ids, cut to the model's context; the closing special token stays."""
        spec = self.model.spec
        limit = self.context or spec.context or spec.position.reach
        return ids if limit is None or len(ids) <= limit else [*ids[: limit - 1], ids[-1]]

    def encode(self, prompt: str, special: bool = True) -> list[int]:
        """The ids of a prompt, with those that the model expects before every text.

        special: special tokens in the prompt, such as <|user|>, become their ids.
        """
        return [*self.tokenizer.prefix_ids, *self.tokenizer.encode(prompt, special)]

    def encode_chat(self, messages: str | ChatMessages) -> list[int]:
        conversation = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        return encode_chat(self.tokenizer, [dict(message) for message in conversation])

    def submit(
        self, ids: list[int], stop: Sequence[str], continues_prompt: bool, options: SamplingOptions
    ) -> "Iterator[tuple[Token, str]]":
        """Submit a request at once, and return an iterator over its tokens and their text."""
        stream = TextStream(self.tokenizer, stop, prompt_ids=ids if continues_prompt else ())
        return self.run(self.engine.submit(ids, self.sampling(options)), stream)

    def sampling(self, options: SamplingOptions) -> Sampling:
        return Sampling(stop_ids=self.tokenizer.stop_ids, **options)

    def run(self, request: Request, stream: TextStream) -> "Iterator[tuple[Token, str]]":
        """Step the engine until this request is done; other requests advance with it."""
        read = 0
        try:
            while True:
                while read < len(request.new) and stream.finish is None:
                    token = request.new[read]
                    read += 1
                    yield token, stream.push(token)
                if request.finish is not None or stream.finish is not None:
                    break
                self.engine.step()
        finally:
            self.engine.cancel(request)
        if request.error is not None:
            raise GenerationError(request.error)


def load(
    name: str | Path,
    device: str = "auto",
    dtype: torch.dtype | None = None,
    context: int | None = None,
    progress: model_folder.Progress | None = None,
) -> LanguageModel:
    """The model of a run, a folder (regard or Hugging Face), a GGUF file, or an installed model such as "smollm2".

    device: cpu, cuda, cuda:1 …; auto: a GPU if there is one. dtype: None is the stored one, on a CPU at least float32.
    context: maximum tokens of prompt and answer; None: the model's own.
    """
    folder = newest_checkpoint(find_model(name))
    model = model_folder.load(folder, resolve_device(device), dtype, checked=folder != Path(name), progress=progress)
    return LanguageModel(model, Tokenizer.load(folder), context)


def newest_checkpoint(path: Path) -> Path:
    """For a run the folder of its newest complete checkpoint; other paths as they are."""
    if not (path / "checkpoints").is_dir():
        return path
    newest = Run.open(path).latest()
    if newest is None:
        raise ValueError(f"{path} has no checkpoint yet; continue its training with: regard train --resume {path}")
    return newest


def resolve_device(name: str) -> str:
    """The device's name; `auto` is the GPU if there is one. Raises ValueError if this machine lacks the device.

    Turns TF32 off in cuDNN, where it is on by default, so that float32 convolutions are computed in float32.
    """
    torch.backends.cudnn.allow_tf32 = False
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError):  # AssertionError: a torch that was built without CUDA
        available = ["auto", "cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        raise ValueError(f"there is no device {name!r} here; choose one of {', '.join(available)}") from None
    return name
