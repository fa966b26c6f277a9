"""Whisper on audio of any length: windows of 30 seconds, each of which starts where the segments before it end.

A `SpeechDecoder` runs no model itself. It yields the requests for an engine and is sent their tokens, so that threads
and asyncio use it alike, and the windows of many audio inputs are decoded in one batch:

    requests = decoder.windows()
    request = next(requests)          then: request = requests.send(tokens), until StopIteration

Windows and segments are those of `transformers` (WhisperGenerationMixin.generate): the text of earlier windows is no
prompt of later ones, and the features of all windows have one scale. Thresholds are those of Radford et al. 2022.
"""

import math
import zlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from regard.audio import HOP, RATE, log_mel
from regard.engine.request import Sampling, Token, derived_seed
from regard.speech.decoding_rules import DecodingRules
from regard.speech.transcription import Segment, Transcription, TranscriptionSettings
from regard.speech.whisper_tokens import WhisperTokens
from regard.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class SpeechModel:
    """What decoding must know of a model."""

    tokenizer: Tokenizer
    tokens: WhisperTokens
    mels: int
    window: int  # frames of 0.01 seconds
    stride: int  # frames per step of a timestamp
    capacity: int  # tokens of the decoder

    def features(self, samples: Tensor) -> Tensor:
        """(T,) samples at 16 kHz -> (mels, frames), at least a window of them"""
        return log_mel(samples, self.mels, max(self.window, len(samples) // HOP))

    def feature_bytes(self, seconds: float) -> int:
        """The memory of the features of so much audio."""
        return 4 * self.mels * max(self.window, math.ceil(seconds * RATE / HOP))

    def prompt_ids(self, prompt: str | None) -> list[int]:
        """The last tokens of a prompt, at most half of the context."""
        if prompt is None or not prompt.strip():
            return []
        if self.tokens.previous is None:
            raise ValueError("this model has no token <|startofprev|> for a prompt; leave the prompt out")
        ids = self.tokenizer.encode(" " + prompt.strip())
        return [self.tokens.previous, *ids[-max(1, self.capacity // 2 - 1) :]]

    def text(self, ids: Sequence[int]) -> str:
        """Without special tokens and timestamps."""
        return self.tokenizer.decode([id for id in ids if id < self.tokens.timestamp_begin])


class WindowRequest(NamedTuple):
    """Arguments of `Engine.submit`."""

    ids: list[int]
    sampling: Sampling
    source: Tensor


WindowRequests = Generator[WindowRequest, Sequence[Token], None]


def next_window(windows: WindowRequests, tokens: Sequence[Token]) -> WindowRequest | None:
    """The request after the one that generated these tokens; None after the last."""
    try:
        return windows.send(tokens)
    except StopIteration:
        return None


class DecodedWindow(NamedTuple):
    ids: list[int]  # without the end token
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class SpeechDecoder:
    def __init__(self, model: SpeechModel, samples: Tensor, settings: TranscriptionSettings):
        """samples (T,) at 16 kHz. ValueError if the model cannot have these settings."""
        self.model, self.settings, self.duration = model, settings, len(samples) / RATE
        self.features = model.features(samples)
        self.frames = min(self.features.shape[1], -(-len(samples) // HOP))  # with audio; the others are padding
        self.timestamps = settings.timestamps or self.frames > model.window
        self.languages, self.tasks = model.tokens.language_ids(settings.language), model.tokens.task_ids(settings.task)
        self.prompt = model.prompt_ids(settings.prompt)
        self.segments: list[Segment] = []
        self.requests = 0

    def windows(self) -> WindowRequests:
        if self.prompt and len(self.languages) > 1:  # the prompt would influence the choice
            rules = DecodingRules(self.model.tokens, 1, [self.languages], timestamps=False)
            found = yield self.request([self.model.tokens.start], rules, self.window_at(0), 0.0, max_new=0)
            self.languages = (found[0].id,)
        seek = 0
        while seek < self.frames:
            features = self.window_at(seek)
            decoded = yield from self.decode(features)
            frames = min(self.frames - seek, self.model.window)
            seek += frames if decoded is None else self.add_segments(decoded, seek, frames)

    def window_at(self, seek: int) -> Tensor:
        """(mels, window) the features from a frame on; after the last, zeros."""
        features = self.features[:, seek : seek + self.model.window]
        return F.pad(features, (0, self.model.window - features.shape[1]))

    def decode(self, features: Tensor) -> Generator[WindowRequest, Sequence[Token], DecodedWindow | None]:
        """The text of a window, at the first temperature that passes the thresholds or the last; None for silence."""
        tokens = self.model.tokens
        ids, settings, decoded = [*self.prompt, tokens.start], self.settings, None
        for temperature in settings.temperatures:
            given = [*([self.languages] if self.languages else []), *([self.tasks] if self.tasks else [])]
            given += [] if self.timestamps else [(tokens.no_timestamps,)]
            rules = DecodingRules(tokens, len(ids), given, self.timestamps)
            found = yield self.request(ids, rules, features, temperature, settings.max_new_tokens)
            self.languages = (found[0].id,) if self.languages else ()
            decoded = self.decoded(rules, found, temperature)
            low = settings.logprob_threshold
            unlikely = low is not None and decoded.avg_logprob < low
            silence = settings.no_speech_threshold
            if silence is not None and decoded.no_speech_prob > silence and (unlikely or low is None):
                return None
            repeats = settings.compression_ratio_threshold
            if not unlikely and (repeats is None or decoded.compression_ratio <= repeats):
                break
        return decoded

    def request(
        self, ids: list[int], rules: DecodingRules, features: Tensor, temperature: float, max_new: int | None
    ) -> WindowRequest:
        limit = self.model.capacity if max_new is None else len(rules.given) + max_new
        seed = derived_seed(self.settings.seed, self.requests)
        self.requests += 1
        sampling = Sampling(
            max_new=limit, temperature=temperature, seed=seed, stop_ids=(self.model.tokens.end,), processors=(rules,)
        )
        return WindowRequest(ids, sampling, features)

    def decoded(self, rules: DecodingRules, found: Sequence[Token], temperature: float) -> DecodedWindow:
        ids = [token.id for token in found[len(rules.given) :]]
        if ids and ids[-1] == self.model.tokens.end:
            ids.pop()
        logprob = rules.mean_logprob([token.logprob for token in found])
        silence = 0.0 if rules.no_speech is None else float(rules.no_speech)
        return DecodedWindow(ids, temperature, logprob, compression_ratio(self.model.text(ids)), silence)

    def add_segments(self, decoded: DecodedWindow, seek: int, frames: int) -> int:
        """Append the segments of a window, and return the frames by which the next window is later."""
        parts, advance = split_segments(decoded.ids, self.model.tokens.timestamp_begin, frames, self.model.stride)
        for start, end, ids in parts:
            first, last = (min((seek + frame) * HOP / RATE, self.duration) for frame in (start, end))
            self.segments.append(Segment(first, last, self.model.text(ids), tuple(ids), seek, *decoded[1:]))
        return advance

    def transcription(self) -> Transcription:
        """Of the windows that are decoded so far."""
        language = self.model.tokens.language_of(self.languages[0]) if self.languages else "en"
        text = "".join(segment.text for segment in self.segments).strip()
        return Transcription(text, tuple(self.segments), language, self.duration)


def split_segments(
    ids: list[int], timestamp_begin: int, frames: int, stride: int
) -> tuple[list[tuple[int, int, list[int]]], int]:
    """Segments (first frame, last frame, ids) of a window with so many frames, and the frames until the next window.

    Two timestamps in a row end a segment. What follows the last two is decoded again in the next window, unless the
    text ends with a single timestamp: there is no speech after that.
    """
    is_timestamp = [id >= timestamp_begin for id in ids]
    borders = [i + 1 for i in range(len(ids) - 1) if is_timestamp[i] and is_timestamp[i + 1]]

    def frame(index: int) -> int:
        return (ids[index] - timestamp_begin) * stride

    if not borders:
        marks = [i for i in range(len(ids)) if is_timestamp[i]]
        end = frame(marks[-1]) if marks and ids[marks[-1]] != timestamp_begin else frames
        return [(0, end, ids)], frames
    single = is_timestamp[-2:] == [False, True]
    stops = [*borders, len(ids)] if single else borders
    parts = [(frame(start), frame(stop - 1), ids[start:stop]) for start, stop in zip([0, *stops], stops, strict=False)]
    return parts, frames if single else frame(stops[-1] - 1)


def compression_ratio(text: str) -> float:
    data = text.encode()
    return len(data) / len(zlib.compress(data))
