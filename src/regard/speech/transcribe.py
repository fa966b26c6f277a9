"""Transcribe recordings with an engine, those of a list in one batch."""

import math
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import fields
from typing import Any

from torch import nn

from regard.audio import Sound
from regard.engine.engine import Engine
from regard.engine.request import GenerationError, QueueFull, Request
from regard.models.encoder_decoder import EncoderDecoderModule
from regard.parts.frames import Frames
from regard.spec import suggest_name
from regard.speech.speech_decoder import SpeechDecoder, SpeechModel, Windows
from regard.speech.transcription import (
    AudioInput,
    TranscriptionOptions,
    TranscriptionSettings,
    read_samples,
)
from regard.speech.whisper_tokens import read_whisper_tokens
from regard.text.tokenizer import Tokenizer

FIELDS = [field.name for field in fields(TranscriptionSettings)]


def speech_model(model: nn.Module, tokenizer: Tokenizer, engine: Engine) -> SpeechModel:
    """ValueError unless the model is a Whisper."""
    source = model.spec.source.input if isinstance(model, EncoderDecoderModule) else None
    if not isinstance(source, Frames):
        spec: Any = model.spec
        raise ValueError(f"this model is of kind {spec.kind} and reads no sound; transcribe with a Whisper model")
    stride, tokens = math.prod(source.strides), read_whisper_tokens(tokenizer, engine.model.spec.vocab)
    return SpeechModel(tokenizer, tokens, source.channels, engine.source_capacity * stride, stride, engine.capacity)


def checked_settings(options: TranscriptionOptions) -> TranscriptionSettings:
    if unknown := [name for name in options if name not in FIELDS]:
        raise TypeError(f"there is no option {unknown[0]!r} of transcribe; {suggest_name(unknown[0], FIELDS)}")
    return TranscriptionSettings(**options)


def transcribe(
    model: SpeechModel, engine: Engine, lock: AbstractContextManager, audio: Any, options: TranscriptionOptions
) -> Any:
    """The Transcription of a recording, or of each in a list. lock: held during every call to the engine."""
    settings, several = checked_settings(options), isinstance(audio, list | tuple) and not isinstance(audio, Sound)
    recordings: list[AudioInput] = list(audio) if several else [audio]
    decoders = [SpeechDecoder(model, read_samples(recording), settings) for recording in recordings]
    run_together(engine, lock, [decoder.windows() for decoder in decoders])
    found = [decoder.transcription() for decoder in decoders]
    return found if several else found[0]


def run_together(engine: Engine, lock: AbstractContextManager, recordings: Sequence[Windows]) -> None:
    """Decode the windows of all recordings. If one fails, all are cancelled."""
    waiting = deque((windows, next(windows)) for windows in recordings)
    running: dict[Request, Windows] = {}
    try:
        while waiting or running:
            with lock:
                try:
                    while waiting:
                        running[engine.submit(*waiting[0][1])] = waiting[0][0]
                        waiting.popleft()
                except QueueFull:
                    pass  # continue after a step
                engine.step()
            for request in [request for request in running if request.finish is not None]:
                windows = running.pop(request)
                if request.finish not in ("stop", "length"):
                    raise GenerationError(request.error or request.finish)
                with suppress(StopIteration):
                    waiting.append((windows, windows.send(request.new)))
    finally:
        with lock:
            for request in running:
                engine.cancel(request)
