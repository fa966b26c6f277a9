"""The transcription of audio, and the settings by which it is made."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor

from regard.audio import RATE, Audio, read_wav, resample

AudioInput = str | Path | np.ndarray | Tensor | Audio  # a WAV file, or samples; those of an array are at 16 kHz


class Segment(NamedTuple):
    start: float  # seconds
    end: float
    text: str
    tokens: tuple[int, ...]  # with timestamps
    seek: int  # the first frame of its window, which is also that of the values below
    temperature: float
    avg_logprob: float
    compression_ratio: float  # of the text; above 2.4 it probably repeats itself
    no_speech_prob: float


@dataclass(frozen=True)
class Transcription:
    text: str
    segments: tuple[Segment, ...]  # where the timestamps are, else one per window
    language: str  # a code, such as en
    duration: float  # seconds


class TranscriptionOptions(TypedDict, total=False):
    """The fields of `TranscriptionSettings` as keyword arguments."""

    language: str | None
    task: str
    timestamps: bool
    prompt: str | None
    temperature: float | Sequence[float]
    max_new_tokens: int | None
    seed: int
    logprob_threshold: float | None
    compression_ratio_threshold: float | None
    no_speech_threshold: float | None


def temperature_fallback() -> TranscriptionOptions:
    """The temperatures and thresholds of Radford et al. 2022, section 4.5.

    If the text of a window repeats itself or is unlikely, the window is decoded again at the next temperature. A window
    that is probably silent and whose text is unlikely has no text.
    """
    return {
        "temperature": (0.0, 0.2, 0.4, 0.6, 0.8, 1.0),
        "logprob_threshold": -1.0,
        "compression_ratio_threshold": 2.4,
        "no_speech_threshold": 0.6,
    }


@dataclass(frozen=True)
class TranscriptionSettings:
    language: str | None = None  # a code or an English name; None: detected
    task: str = "transcribe"  # or translate: into English
    timestamps: bool = False  # of segments; audio that is longer than a window always has them
    prompt: str | None = None  # text that precedes the audio: names, spellings, style
    temperature: float | Sequence[float] = 0.0  # several: tried in this order until no threshold is exceeded
    max_new_tokens: int | None = None  # per window; None: what fits into the context
    seed: int = 0
    logprob_threshold: float | None = None  # the lowest mean log-probability of a text
    compression_ratio_threshold: float | None = None  # the highest
    no_speech_threshold: float | None = None  # the highest probability of silence for a text below logprob_threshold

    def __post_init__(self) -> None:
        if not self.temperatures or not all(is_number(t) and 0 <= t < float("inf") for t in self.temperatures):
            raise ValueError(f"temperature={self.temperature!r} must be a number of at least 0, or several")
        for name in ("logprob_threshold", "compression_ratio_threshold", "no_speech_threshold"):
            value = getattr(self, name)
            if value is not None and not is_number(value):
                raise ValueError(f"{name}={value!r} must be a number, or None for no threshold")
        if self.max_new_tokens is not None and (type(self.max_new_tokens) is not int or self.max_new_tokens < 1):
            raise ValueError(f"max_new_tokens={self.max_new_tokens!r} must be a positive integer, or None")

    @property
    def temperatures(self) -> tuple[Any, ...]:
        return (self.temperature,) if is_number(self.temperature) else tuple(self.temperature)  # ty: ignore


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def read_samples(audio: AudioInput) -> Tensor:
    """(T,) samples at 16 kHz, in float32. ValueError if there are none, or they are not finite."""
    if isinstance(audio, str | Path):
        try:
            audio = read_wav(Path(audio).read_bytes())
        except ValueError as error:
            raise ValueError(f"{audio}: {error}") from error
    elif not isinstance(audio, Audio):
        audio = Audio(torch.as_tensor(audio), RATE)
    samples = audio.samples
    if samples.dim() != 1 or not samples.is_floating_point():
        found = f"shape {tuple(samples.shape)} and type {samples.dtype}"
        raise ValueError(f"the samples have {found}; give one channel of floats from -1 to 1, such as int16 / 32768")
    if not len(samples) or not bool(samples.isfinite().all()):
        raise ValueError("the audio has no samples, or some are not finite; give at least one")
    return resample(samples.float().cpu(), audio.rate, RATE)
