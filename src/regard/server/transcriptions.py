"""POST /v1/audio/transcriptions and /v1/audio/translations: the text of an audio file, by a Whisper model.

The body is a form (multipart/form-data) with a WAV file. A temperature of 0, the default, is raised for a window whose
text repeats itself or is unlikely, as OpenAI describes it. A stream has an event per window.
"""

from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Form, Request, UploadFile
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from starlette.responses import Response

from regard.engine.request import RequestOptions
from regard.server.errors import ApiError
from regard.server.middleware import tenant_of
from regard.server.model_registry import ModelRegistry
from regard.server.response_bodies import ResponseBody, or_stream
from regard.server.responses import data_events, event, respond
from regard.server.schema import Name, refuse_unknown_fields
from regard.server.served_model import ServedModel
from regard.server.speech_task import SpeechTask, audio_bytes, open_audio
from regard.speech.subtitles import plain_text, srt, verbose, vtt
from regard.speech.transcription import TranscriptionOptions, TranscriptionSettings, temperature_fallback

MULTIPART = "multipart/form-data"
TEXT_FORMATS = {"text": plain_text, "srt": srt, "vtt": vtt}


class AudioForm(BaseModel):
    """The fields of both routes. The values of a form are strings, so they are converted."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    file: UploadFile
    model: Name | None = None
    prompt: Annotated[str, StringConstraints(max_length=1 << 16)] | None = None
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    temperature: Annotated[float, Field(ge=0, le=1)] = 0

    @model_validator(mode="before")
    @classmethod
    def check_fields(cls, data: Any) -> Any:
        return refuse_unknown_fields(cls, data)

    def settings(self, task: str, language: str | None = None) -> TranscriptionSettings:
        timestamps = self.response_format in ("srt", "verbose_json", "vtt")
        options: TranscriptionOptions = (
            {"temperature": self.temperature} if self.temperature else temperature_fallback()
        )
        options |= {"language": language, "task": task, "timestamps": timestamps, "prompt": self.prompt}
        return TranscriptionSettings(**options)


class TranscriptionForm(AudioForm):
    language: Name | None = None
    stream: bool = False
    timestamp_granularities: Annotated[
        list[Literal["segment", "word"]], Field(alias="timestamp_granularities[]", max_length=2)
    ] = Field(default_factory=list)

    @model_validator(mode="after")
    def check_combinations(self) -> "TranscriptionForm":
        if self.stream and self.response_format != "json":
            raise ValueError(f"a stream has no response_format={self.response_format}; send json, or omit stream")
        if "word" in self.timestamp_granularities:
            raise ValueError("timestamps of words are not supported; send timestamp_granularities[]=segment")
        if self.timestamp_granularities and self.response_format != "verbose_json":
            raise ValueError("timestamp_granularities[] needs response_format=verbose_json; send it, or omit both")
        return self


class AudioUsage(ResponseBody):
    type: Literal["duration"]
    seconds: float


class TranscriptionJson(ResponseBody):
    text: str
    usage: AudioUsage


class TranscriptionSegment(ResponseBody):
    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class VerboseTranscription(TranscriptionJson):
    """response_format=verbose_json"""

    task: Literal["transcribe", "translate"]
    language: str
    duration: float
    segments: list[TranscriptionSegment]


def documented(*extra: str) -> dict[int | str, dict[str, Any]]:
    """The responses of a route, with these content types beside JSON."""
    responses = or_stream(TranscriptionJson)
    responses[200]["model"] = TranscriptionJson | VerboseTranscription
    content = responses[200]["content"] | {"text/plain": {"schema": {"type": "string"}}}
    responses[200]["content"] = {name: content[name] for name in extra}
    return responses


def router(models: ModelRegistry) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/audio/transcriptions", responses=documented("text/plain", "text/event-stream"))
    async def transcriptions(
        body: Annotated[TranscriptionForm, Form(media_type=MULTIPART)], request: Request
    ) -> Response:
        task = await open_task(models.find_for(body), body, body.settings("transcribe", body.language), request)
        return await respond(request, body.stream, TranscriptionResponse(body, task))

    @routes.post("/v1/audio/translations", responses=documented("text/plain"))
    async def translations(body: Annotated[AudioForm, Form(media_type=MULTIPART)], request: Request) -> Response:
        task = await open_task(models.find_for(body), body, body.settings("translate"), request)
        return await respond(request, False, TranscriptionResponse(body, task))

    return routes


async def open_task(
    served: ServedModel, body: AudioForm, settings: TranscriptionSettings, request: Request
) -> SpeechTask:
    model, engine = served.speech, served.engine
    if model is None or engine is None:
        message = f"the model {served.name!r} reads no audio; use a Whisper model"
        raise ApiError(404, message, code="no_transcription", param="model")
    try:
        model.tokens.language_ids(settings.language)
    except ValueError as error:
        raise ApiError(400, str(error), code="invalid_value", param="language") from error
    served.check_queue()
    tenant = tenant_of(request)
    options = RequestOptions(salt=tenant, tenant=tenant, adapter=served.adapter)
    thread, file = served.audio_thread, body.file.file  # a long one is on disk until its turn
    with ExitStack() as stack:  # until the response ends
        stack.enter_context(thread.request())
        stack.enter_context(thread.hold(await thread.run(audio_bytes, model, file)))
        decoder = await thread.run(open_audio, model, file, settings)
        task = SpeechTask(engine, decoder, served.metrics, options, stack.pop_all().close)
    await task.start()  # before the response starts, so that a refusal has a status
    return task


class TranscriptionResponse:
    def __init__(self, body: AudioForm, task: SpeechTask):
        self.request, self.generation, self.decoder = body, task, task.decoder

    def body(self) -> dict | str:
        found, format = self.decoder.transcription(), self.request.response_format
        if format in TEXT_FORMATS:
            return TEXT_FORMATS[format](found)
        fields = {"text": found.text} if format == "json" else verbose(found, self.decoder.settings.task)
        return fields | {"usage": {"type": "duration", "seconds": found.duration}}

    def events(self) -> AsyncIterator[str]:
        return data_events(self.chunks())

    async def chunks(self) -> AsyncIterator[str]:
        async for part in self.generation:
            yield event({"type": "transcript.text.delta", "delta": part})
        yield event({"type": "transcript.text.done", "text": self.decoder.transcription().text})
