"""Transcribe audio with an engine, the items of a list in one batch."""

import math
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any

from torch import nn

from regard.audio import Audio
from regard.engine.engine import Engine
from regard.engine.jobs import run_jobs
from regard.engine.request import Request
from regard.models.encoder_decoder import EncoderDecoderModule
from regard.parts.frames import Frames
from regard.spec import suggest_name
from regard.speech.speech_decoder import SpeechDecoder, SpeechModel, WindowRequests, next_window
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
        raise ValueError(f"this model is of kind {spec.kind} and reads no audio; transcribe with a Whisper model")
    stride, tokens = math.prod(source.strides), read_whisper_tokens(tokenizer, engine.model.spec.vocab)
    return SpeechModel(tokenizer, tokens, source.channels, engine.source_capacity * stride, stride, engine.capacity)


def checked_settings(options: TranscriptionOptions) -> TranscriptionSettings:
    if unknown := [name for name in options if name not in FIELDS]:
        raise TypeError(f"there is no option {unknown[0]!r} of transcribe; {suggest_name(unknown[0], FIELDS)}")
    return TranscriptionSettings(**options)


def transcribe(
    model: SpeechModel, engine: Engine, lock: AbstractContextManager, audio: Any, options: TranscriptionOptions
) -> Any:
    """The Transcription of one AudioInput, or of each in a list. lock: held during every call to the engine."""
    settings, several = checked_settings(options), isinstance(audio, list | tuple) and not isinstance(audio, Audio)
    inputs: list[AudioInput] = list(audio) if several else [audio]
    decoders = [SpeechDecoder(model, read_samples(each), settings) for each in inputs]
    run_jobs(engine, lock, [WindowJob(engine, decoder.windows()) for decoder in decoders])
    found = [decoder.transcription() for decoder in decoders]
    return found if several else found[0]


class WindowJob:
    """The windows of one audio input, one request after another."""

    def __init__(self, engine: Engine, windows: WindowRequests):
        self.engine, self.windows = engine, windows
        self.window = next(windows, None)

    def submit(self) -> Request:
        assert self.window is not None, "the job is not finished"
        return self.engine.submit(*self.window)

    def read(self, request: Request) -> bool:
        if request.finish is None:
            return False
        self.window = next_window(self.windows, request.new)
        return True

    @property
    def finished(self) -> bool:
        return self.window is None
