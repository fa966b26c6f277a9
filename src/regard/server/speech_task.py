"""The transcription of one HTTP request: the windows of a recording, one request to the engine after another."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

from regard.audio import Sound, read_wav
from regard.engine.async_engine import AsyncEngine, Failure, RequestHandle
from regard.engine.request import QueueFull, RequestOptions, Token
from regard.server.errors import ApiError
from regard.server.generation import queue_full
from regard.server.metrics import RequestMetrics
from regard.speech.speech_decoder import SpeechDecoder, SpeechModel, WindowRequest, Windows
from regard.speech.transcription import TranscriptionSettings, read_samples

MAX_SECONDS = 3600  # of a recording
RETRY = 0.1  # seconds until a later window, which found the queue full, is submitted again


def open_recording(model: SpeechModel, data: bytes, settings: TranscriptionSettings) -> SpeechDecoder:
    """The decoder of a WAV file; 400 if it is damaged or too long. It takes long: call it in a thread."""
    try:
        sound: Sound = read_wav(data, MAX_SECONDS)
        samples = read_samples(sound)
    except ValueError as error:
        raise ApiError(400, f"the file cannot be read: {error}", code="invalid_audio", param="file") from error
    try:
        return SpeechDecoder(model, samples, settings)
    except ValueError as error:
        raise ApiError(400, str(error), code="invalid_value") from error


def next_window(windows: Windows, tokens: Sequence[Token]) -> WindowRequest | None:
    try:
        return windows.send(tokens)
    except StopIteration:
        return None


class SpeechTask:
    """Iterate over it for the text in parts, one per window; always call `cancel` at the end."""

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
        self.handle: RequestHandle | None = None
        self.prompt_tokens = self.new_tokens = 0

    async def __aiter__(self) -> AsyncIterator[str]:
        windows, sent = self.decoder.windows(), ""
        window = next(windows, None)
        while window is not None:
            tokens = await self.run(window)
            window = await asyncio.to_thread(next_window, windows, tokens)  # waits for the device
            text = self.decoder.transcription().text
            part, sent = text[len(sent) :], text
            if part:
                yield part

    async def wait(self) -> None:
        async for _ in self:
            pass

    async def run(self, window: WindowRequest) -> list[Token]:
        """The tokens of a window."""
        events: asyncio.Queue[Token | Failure] = asyncio.Queue()
        submit = partial(self.engine.engine.submit, source=window.source)
        handle = RequestHandle(window.ids, window.sampling, events.put_nowait, submit, self.options)
        await self.submit(handle)
        first, tokens = 0.0, list[Token]()
        while not tokens or tokens[-1].finish is None:
            event = await events.get()
            if isinstance(event, Failure):
                raise ApiError(500, str(event), code="engine_error")
            first = first or time.monotonic()
            tokens.append(event)
        self.prompt_tokens += len(window.ids)
        self.new_tokens += len(tokens)
        self.metrics.observe(handle, first, len(tokens))
        return tokens

    async def submit(self, handle: RequestHandle) -> None:
        waits, self.handle = self.handle is not None, handle
        while True:
            try:
                return await self.engine.submit([handle])
            except QueueFull as error:
                if not waits:
                    raise queue_full(error) from error
                await asyncio.sleep(RETRY)  # a part of the response is there already

    def cancel(self) -> None:
        self.release()
        if self.handle is not None:
            self.engine.cancel(self.handle)

    def usage(self) -> dict[str, int]:
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.new_tokens}
