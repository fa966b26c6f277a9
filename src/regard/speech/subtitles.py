"""A transcription as text, subtitles (SubRip, WebVTT) or JSON with OpenAI's fields."""

import json
from collections.abc import Iterable
from typing import Any

from regard.speech.transcription import Segment, Transcription
from regard.speech.whisper_tokens import language_name


def timecode(seconds: float, separator: str) -> str:
    """hours:minutes:seconds and milliseconds"""
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{rest // 1000:02}{separator}{rest % 1000:03}"


def cues(segments: Iterable[Segment], separator: str) -> list[str]:
    """The time and text of each segment that has text. A line of it must not look like the time of a cue."""
    return [
        f"{timecode(segment.start, separator)} --> {timecode(segment.end, separator)}\n{text}\n"
        for segment in segments
        if (text := " ".join(segment.text.split()).replace("-->", "->"))
    ]


def srt(transcription: Transcription) -> str:
    return "".join(f"{index}\n{cue}\n" for index, cue in enumerate(cues(transcription.segments, ","), 1))


def vtt(transcription: Transcription) -> str:
    return "WEBVTT\n\n" + "".join(f"{cue}\n" for cue in cues(transcription.segments, "."))


def plain_text(transcription: Transcription) -> str:
    return transcription.text + "\n"


def timed_text(transcription: Transcription) -> str:
    """A line per segment: [00:00:01.200 --> 00:00:03.000]  text"""
    lines = (cue.rstrip("\n").split("\n") for cue in cues(transcription.segments, "."))
    return "".join(f"[{times}]  {text}\n" for times, text in lines)


def verbose(transcription: Transcription, task: str) -> dict[str, Any]:
    """The language is that of the text: English for a translation."""
    return {
        "task": task,
        "language": "english" if task == "translate" else language_name(transcription.language),
        "duration": transcription.duration,
        "text": transcription.text,
        "segments": [
            {"id": index} | segment._asdict() | {"tokens": list(segment.tokens)}
            for index, segment in enumerate(transcription.segments)
        ],
    }


def as_json(transcription: Transcription, task: str) -> str:
    return json.dumps(verbose(transcription, task), ensure_ascii=False, indent=2) + "\n"
