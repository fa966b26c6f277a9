"""The transcription of one HTTP request: the windows of its audio, one request to the engine after another."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import BinaryIO

from regard.audio import read_wav, wav_seconds
from regard.engine.async_engine import AsyncEngine, Failure, RequestHandle
from regard.engine.request import RequestOptions, Token
from regard.server.errors import ApiError
from regard.server.generation import request_failed, submission_errors
from regard.server.metrics import RequestMetrics
from regard.speech.speech_decoder import SpeechDecoder, SpeechModel, WindowRequest, next_window
from regard.speech.transcription import TranscriptionSettings, read_samples

MAX_SECONDS = 3600  # of audio


def audio_bytes(model: SpeechModel, file: BinaryIO) -> int:
    """The memory that the decoder of a WAV file will keep; 400 if the file is damaged or too long."""
    with file_errors():
        return model.feature_bytes(wav_seconds(file, MAX_SECONDS))


def open_audio(model: SpeechModel, file: BinaryIO, settings: TranscriptionSettings) -> SpeechDecoder:
    """The decoder of a WAV file; 400 if it is damaged or too long. It takes long: call it in a thread."""
    with file_errors():
        samples = read_samples(read_wav(file, MAX_SECONDS))
    try:
        return SpeechDecoder(model, samples, settings)
    except ValueError as error:
        raise ApiError(400, str(error), code="invalid_value") from error


@contextmanager
def file_errors() -> Generator[None]:
    try:
        yield
    except ValueError as error:
        raise ApiError(400, f"the file cannot be read: {error}", code="invalid_audio", param="file") from error


class SpeechTask:
    """Call `start`, then iterate over it for the text in parts, one per window; always call `cancel` at the end."""

    def __init__(
        self,
        engine: AsyncEngine,
        decoder: SpeechDecoder,
        metrics: RequestMetrics,
        options: RequestOptions,
        release: Callable[[], None],
    ):
        """release: called once by `cancel`."""
        self.engine, self.decoder, self.metrics, self.options, self.release = engine, decoder, metrics, options, release
        self.windows = decoder.windows()
        self.events: asyncio.Queue[Token | Failure] = asyncio.Queue()
        self.handle = self.new_handle(next(self.windows))  # there is always a first one
        self.prompt_tokens = self.new_tokens = 0

    async def start(self) -> None:
        """Submit the first window. If the engine refuses it, the task is cancelled, and ApiError is raised."""
        try:
            with submission_errors():
                await self.engine.submit([self.handle])
        except BaseException:
            self.cancel()
            raise

    async def __aiter__(self) -> AsyncIterator[str]:
        sent = ""
        while True:
            tokens = await self.read_tokens()
            window = await asyncio.to_thread(next_window, self.windows, tokens)  # waits for the device
            text = self.decoder.transcription().text
            part, sent = text[len(sent) :], text
            if part:
                yield part
            if window is None:
                return
            self.handle = self.new_handle(window)
            with submission_errors():
                await self.engine.submit_when_free(self.handle)

    async def wait(self) -> None:
        async for _ in self:
            pass

    def new_handle(self, window: WindowRequest) -> RequestHandle:
        submit = partial(self.engine.engine.submit, source=window.source)
        return RequestHandle(window.ids, window.sampling, self.events.put_nowait, submit, self.options)

    async def read_tokens(self) -> list[Token]:
        """The tokens of the window that was submitted last."""
        first, tokens = 0.0, list[Token]()
        while not tokens or tokens[-1].finish is None:
            event = await self.events.get()
            if isinstance(event, Failure):
                raise request_failed(event)
            first = first or time.monotonic()
            tokens.append(event)
        self.prompt_tokens += len(self.handle.ids)
        self.new_tokens += len(tokens)
        self.metrics.observe(self.handle, first, len(tokens))
        return tokens

    def cancel(self) -> None:
        self.release()
        self.engine.cancel(self.handle)

    def usage(self) -> dict[str, int]:
        prompt, new = self.prompt_tokens, self.new_tokens
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
