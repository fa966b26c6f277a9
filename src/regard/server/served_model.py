"""A model that the routes serve: its name, its engine in a thread, its tokenizer, and optionally a lens."""

import time
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from regard.engine.async_engine import AsyncEngine, Submit
from regard.engine.engine import Engine, LoraWeights
from regard.engine.grammar import Grammar
from regard.engine.request import PromptEmbeddings
from regard.server.chat_schema import ChatBody, Message
from regard.server.errors import ApiError
from regard.server.generation import GenerationTask, RouteOptions, engine_requests, request_options, submission_errors
from regard.server.image_input import MAX_IMAGES, ImageReader, decode_images
from regard.server.lens_thread import Lens, LensThread
from regard.server.metrics import RequestMetrics
from regard.server.responses_api_schema import ResponsesBody
from regard.server.schema import SamplingBody, StructuredOutputs
from regard.server.structured_output import GrammarThread
from regard.server.tool_calls import OfferedTools, offered_tools
from regard.server.worker_thread import WorkerThread, stop_all
from regard.speech.speech_decoder import SpeechModel
from regard.text.chat import encode_chat, refused_variable, strings_in
from regard.text.infilling import encode_infilling, infilling_tokens
from regard.text.tokenizer import Tokenizer

MAX_AUDIO_REQUESTS = 32  # transcriptions at a time
MAX_AUDIO_BYTES = 1 << 30  # of their features; those of an hour take 115 MB, or 184 MB with 128 mels
MAX_CONTEXT = 1 << 20  # tokens, where neither an engine nor an encoder limits them


class TextEncoder(NamedTuple):
    """`embed(texts)` returns unit vectors (N, D), `score(pairs)` the relevance of each second text to the first.

    At least one of them is set. A text, or a pair, has at most `context` tokens (None: any number).
    """

    embed: Callable[[Sequence[str]], Tensor] | None = None
    score: Callable[[Sequence[tuple[str, str]]], Sequence[float]] | None = None
    context: int | None = None


class Inspected(NamedTuple):
    """The module of a model, for its drawing and the lens. `start` starts the output of an encoder-decoder."""

    module: nn.Module
    start: int | None = None


class ServedModel:
    """`engine` is None for a model that only encodes texts. `encoder` is for embeddings and ranking. `submit_source`
    submits a prompt as the source of an encoder-decoder; None: a decoder continues the prompt. `read_adapter` reads the
    adapter of a folder, for clients that load one. `images` is for a model that reads images, `speech` for one that
    transcribes audio."""

    adapter: str | None = None  # set by with_adapter
    parent: str | None = None  # the name of the model that the adapter is for
    shapes: dict[str, list[str | int]] | None = None  # of all activations, computed when a client first asks for them

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        engine: Engine | None = None,
        *,
        lens: Lens | None = None,
        encoder: TextEncoder | None = None,
        submit_source: Submit | None = None,
        read_adapter: Callable[[Path], LoraWeights] | None = None,
        images: ImageReader | None = None,
        speech: SpeechModel | None = None,
        inspected: Inspected | None = None,
    ):
        self.name, self.created, self.tokenizer = name, int(time.time()), tokenizer
        self.engine = None if engine is None else AsyncEngine(engine, submit_source)
        self.inspected, self.lens_thread = inspected, WorkerThread("lens")
        self.lens = None if lens is None else LensThread(lens, self.lens_thread)
        self.encoder, self.encoder_thread = encoder, WorkerThread("encoder")
        self.images, self.image_thread = images, WorkerThread("images")
        self.speech, self.audio_thread = speech, WorkerThread("audio", MAX_AUDIO_REQUESTS, MAX_AUDIO_BYTES)
        self.prompt_is_source = submit_source is not None  # for an encoder-decoder
        self.read_adapter = read_adapter
        self.metrics = RequestMetrics()
        self._grammars = GrammarThread(tokenizer)
        # For tokenizing: a long prompt must not block the event loop. One thread, since a tokenizer has a lock.
        self.tokenizer_thread = WorkerThread("tokenizer")

    @property
    def generator(self) -> AsyncEngine:
        """The engine; 404 if the model does not continue prompts."""
        if self.speech is not None:
            message = "this model transcribes audio; use /v1/audio/transcriptions"
            raise ApiError(404, message, code="no_generation")
        if self.engine is None:
            raise ApiError(404, "this model generates no text; use /v1/embeddings", code="no_generation")
        return self.engine

    @property
    def alive(self) -> bool:
        return self.engine is None or self.engine.alive

    @property
    def busy(self) -> bool:
        """Whether requests run or wait."""
        return any(thread.busy for thread in self.threads) or self.engine is not None and self.engine.busy

    @property
    def threads(self) -> tuple[WorkerThread, ...]:
        """Those beside the engine's."""
        work = (self.encoder_thread, self.image_thread, self.audio_thread, self.lens_thread)
        return (*work, self._grammars.thread, self.tokenizer_thread)

    @property
    def chats(self) -> bool:
        generates = self.engine is not None and self.speech is None and not self.prompt_is_source
        return generates and self.tokenizer.chat_template is not None

    @property
    def context(self) -> int | None:
        """Tokens of prompt and answer, or of a text that an encoder reads; None: any number."""
        if self.engine is not None:
            return self.engine.engine.capacity
        return None if self.encoder is None else self.encoder.context

    @property
    def capacity(self) -> int:
        """Tokens that fit into a request."""
        return MAX_CONTEXT if self.context is None else self.context

    @property
    def prompt_capacity(self) -> int:
        """Tokens of a prompt: for an encoder-decoder those of its source, which do not count in its decoder."""
        return self.generator.engine.source_capacity if self.prompt_is_source else self.capacity

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the loaded adapters, which are names of models in the API."""
        return () if self.engine is None else self.engine.engine.adapters

    def with_adapter(self, name: str) -> "ServedModel":
        """The model with this adapter, under its name; everything else is shared."""
        model = copy(self)
        model.name = model.adapter = name
        model.parent = self.name
        model.lens = model.inspected = None  # they would show the model without the adapter
        return model

    def start(self) -> None:
        if self.engine is not None:
            self.engine.start()

    async def stop(self) -> None:
        if self.engine is not None:
            await self.engine.stop()
        await stop_all(*self.threads)

    def check_queue(self) -> None:
        """Refuse a request with 429, before it is tokenized, if the engine's queue is full."""
        if self.engine is not None:
            with submission_errors():
                self.engine.check_queue(1)

    def check_length(self, characters: int) -> None:
        """Refuse a text before it is tokenized if it cannot fit even with the longest tokens of the vocabulary."""
        capacity = self.prompt_capacity
        if characters > capacity * self.tokenizer.max_token_length:
            message = f"{characters} characters cannot fit into the {capacity} tokens of this model; shorten the text"
            raise ApiError(400, message, code="context_length_exceeded")

    async def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        self.check_length(len(text))
        return await self._in_tokenizer_thread(self._encode if special_tokens else self.tokenizer.encode, text)

    async def encode_with_special_tokens(self, text: str) -> list[int]:
        """The ids as an encoder reads them."""
        self.check_length(len(text))
        return await self._in_tokenizer_thread(self.tokenizer.encode_with_special_tokens, text)

    async def encode_infilling(self, prompts: list[str], suffix: str) -> tuple[tuple[int, ...], list[list[int]]]:
        """The stop ids and prompts for the text between each prompt and the suffix; 400 if the model cannot infill."""
        tokens = infilling_tokens(self.tokenizer)
        if tokens is None:
            message = (
                "this model has no tokens for fill-in-the-middle; omit suffix, or use a model of code that has them"
            )
            raise ApiError(400, message, code="suffix_not_supported", param="suffix")
        for prompt in prompts:
            self.check_length(len(prompt) + len(suffix))
        encode = partial(encode_infilling, self.tokenizer, tokens)
        return tokens.stop_ids, [await self._in_tokenizer_thread(encode, prompt, suffix) for prompt in prompts]

    async def decode(self, ids: list[int], special: bool = True) -> str:
        return await self._in_tokenizer_thread(lambda: self.tokenizer.decode(ids, special))

    async def encode_chat(
        self,
        messages: list[Message],
        add_generation_prompt: bool,
        tools: OfferedTools | None = None,
        variables: dict[str, Any] | None = None,
    ) -> list[int]:
        """The ids of the conversation in the model's chat template; the generation prompt starts the next answer.

        An image has as many ids as patches. variables: of the template, besides messages and tools.
        """
        if self.prompt_is_source:
            message = "this model is an encoder-decoder and has no chats; use /v1/completions"
            raise ApiError(400, message, code="no_chat", param="messages")
        if self.tokenizer.chat_template is None:
            route = "/v1/embeddings" if self.engine is None else "/v1/completions"
            message = f"this model has no chat template; use {route}"
            raise ApiError(400, message, code="no_chat_template", param="messages")
        if variables and (refusal := await self._in_tokenizer_thread(refused_variable, self.tokenizer, variables)):
            raise ApiError(400, refusal, code="invalid_value", param="chat_template_kwargs")
        conversation = [message.for_template() for message in messages]
        offered = None if tools is None else tools.for_template()
        written = [[message.get(key) for key in ("content", "name", "tool_calls")] for message in conversation]
        self.check_length(sum(map(len, strings_in([written, offered, variables]))))
        count, token = sum(len(message.images) for message in messages), None
        if count:
            token = self.image_reader(count).token
        arguments = (self.tokenizer, conversation, add_generation_prompt, offered, token, variables)
        ids = await self._in_tokenizer_thread(encode_chat, *arguments)
        return ids if self.images is None else await self._in_tokenizer_thread(self.images.expand, ids, count)

    def image_reader(self, count: int) -> ImageReader:
        """400 if the model cannot read this many images."""
        if self.images is None:
            raise ApiError(400, "this model reads no images; send text only", code="no_images", param="messages")
        if count > MAX_IMAGES:
            message = f"the messages have {count} images; send at most {MAX_IMAGES}"
            raise ApiError(400, message, code="invalid_value", param="messages")
        return self.images

    async def embed_images(self, ids: list[int], messages: list[Message]) -> PromptEmbeddings | None:
        """The embeddings of the ids of a conversation, for all its choices; None if it has no images."""
        urls = [url for message in messages for url in message.images]
        if not urls:
            return None
        if len(ids) >= self.capacity:
            message = f"{len(ids)} tokens of text and images exceed this model's {self.capacity}; send fewer"
            raise ApiError(400, message, code="context_length_exceeded", param="messages")
        embed, prepare = self.image_reader(len(urls)).embed, self.generator.engine.prompt_embeddings
        with self.image_thread.request():
            try:
                return await self.image_thread.run(lambda: prepare(ids, embed(ids, decode_images(urls))))
            except ValueError as error:
                raise ApiError(400, str(error), code="invalid_image", param="messages") from error

    async def token_texts(self, ids: list[int]) -> list[str]:
        """A readable string for each id. Not computed in the event loop: a long text takes 0.1 seconds."""
        return await self._in_tokenizer_thread(lambda: [self.tokenizer.decode_token(id) for id in ids])

    def offered_tools(self, body: ChatBody | ResponsesBody) -> OfferedTools | None:
        """The tools that the model may call in its answer to a request."""
        template = self.tokenizer.chat_template
        return offered_tools(body.functions_offered, body.tool_choice, body.parallel_tool_calls, template)

    async def grammar(self, outputs: StructuredOutputs | OfferedTools | None) -> Grammar | None:
        return None if outputs is None else await self._grammars.compile(outputs, self.generator.engine)

    async def generate(self, body: SamplingBody, prompts: list[list[int]], options: RouteOptions) -> GenerationTask:
        """A generation that the engine has accepted. Raises ApiError if the engine refuses it."""
        engine = self.generator
        # The source has its own capacity; in the decoder only the start token counts.
        lengths = [min(len(ids), 1) if self.prompt_is_source else len(ids) for ids in prompts]
        stop_ids = self.stop_ids(body, options)
        if body.stop_token_ids and body.ignore_eos:  # the engine would ignore these too
            body = body.model_copy(update={"ignore_eos": None})
        requests = engine_requests(body, prompts, lengths, self.capacity, stop_ids, options)
        continues = options.continues_prompt and not self.prompt_is_source
        order, submit = request_options(body, options.tenant), None
        if self.adapter is not None:
            order["adapter"] = self.adapter
        if options.embeddings is not None:
            submit = partial(engine.engine.submit, embeddings=options.embeddings)
        elif self.images is not None and any(self.images.marker in ids for ids in prompts):
            message = (
                f"the prompt has the token {self.images.token} without an image; send images to /v1/chat/completions"
            )
            raise ApiError(400, message, code="invalid_value", param="prompt")
        generation = GenerationTask(
            engine, self.tokenizer, requests, body.stops, continues, self.metrics, order, submit, body.max_tokens == 0
        )
        await generation.submit()
        return generation

    def stop_ids(self, body: SamplingBody, options: RouteOptions) -> tuple[int, ...]:
        """The ids that end a choice: those of the tokenizer and the route, unless `ignore_eos`, and the request's."""
        given, vocab = body.stop_token_ids or [], self.generator.engine.model.spec.vocab
        if given and (largest := max(given)) >= vocab:
            message = f"id {largest} is outside the vocabulary of {vocab}; send ids of this model"
            raise ApiError(400, message, code="invalid_value", param="stop_token_ids")
        own = () if given and body.ignore_eos else (*self.tokenizer.stop_ids, *options.stop_ids)
        return tuple(dict.fromkeys((*own, *given)))

    def _encode(self, text: str) -> list[int]:
        if self.prompt_is_source:
            return self.tokenizer.encode_with_special_tokens(text)
        return [*self.tokenizer.prefix_ids, *self.tokenizer.encode(text)]

    async def _in_tokenizer_thread(self, function: Callable, *args: Any) -> Any:
        try:
            return await self.tokenizer_thread.run(function, *args)
        except ValueError as error:  # a character outside the vocabulary, or messages that the template rejects
            raise ApiError(400, str(error), code="invalid_text") from error
