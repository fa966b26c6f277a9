"""Audio files over HTTP: formats, streams, forms that are refused, and the official `openai` client."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from regard.cli.open_served import generating_model
from regard.engine.async_engine import SHUTTING_DOWN, AsyncEngine, EngineStopped
from regard.engine.request import QueueFull
from regard.language_model import LanguageModel
from regard.server.app import create_app
from regard.server.network_options import NetworkOptions
from regard.server.served_model import MAX_AUDIO_REQUESTS, ServedModel
from regard.speech.speech_decoder import SpeechDecoder
from regard.speech.transcription import TranscriptionSettings, temperature_fallback
from regard.text.train import byte
from tests.server.conftest import serve, wait_until
from tests.server.fake_engine import FakeEngine
from tests.speech.audio_files import noise, stored, wav

SHORT, LONG = noise(0.9, 1), noise(1.6, 2)


@pytest.fixture(scope="module")
def llm(whisper: LanguageModel) -> LanguageModel:
    """With an engine of its own, because that of the server runs in a thread."""
    return LanguageModel(whisper.model, whisper.tokenizer, generation=whisper.generation)


@pytest.fixture(scope="module")
def served(whisper: LanguageModel) -> ServedModel:
    return generating_model("whisper", Path("whisper"), whisper)


@pytest.fixture(scope="module")
def url(served: ServedModel) -> Iterator[str]:
    text = ServedModel("text", byte(), FakeEngine(byte(), "a reply"))
    with serve(create_app([text, served], NetworkOptions(keys=("k",), max_body=200_000))) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url + "/v1", api_key="k", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def web(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, headers={"authorization": "Bearer k"}, timeout=60) as web:
        yield web


def test_formats_equal_the_transcription_in_python(client: openai.OpenAI, llm: LanguageModel) -> None:
    plain = llm.transcribe(stored(SHORT), **temperature_fallback())
    found = client.audio.transcriptions.create(model="whisper", file=("a.wav", wav(SHORT)))
    assert found.text == plain.text and found.usage.seconds == 0.9
    text = client.audio.transcriptions.create(model="whisper", file=("a.wav", wav(SHORT)), response_format="text")
    assert text == plain.text + "\n"
    options = {"model": "whisper", "file": ("a.wav", wav(LONG)), "language": "de", "prompt": "Anna"}
    timed = llm.transcribe(stored(LONG), language="de", prompt="Anna", temperature=0.5, timestamps=True)
    verbose = client.audio.transcriptions.create(
        **options, temperature=0.5, response_format="verbose_json", timestamp_granularities=["segment"]
    )
    assert (verbose.language, verbose.text, verbose.duration) == ("german", timed.text, 1.6)
    segments = [(each.start, each.end, each.text, tuple(each.tokens), each.seek) for each in verbose.segments]
    assert segments == [each[:5] for each in timed.segments] and verbose.segments[0].temperature == 0.5
    srt = client.audio.transcriptions.create(**options, temperature=0.5, response_format="srt")
    vtt = client.audio.transcriptions.create(**options, temperature=0.5, response_format="vtt")
    assert srt.startswith("1\n00:00:0") and vtt.startswith("WEBVTT\n\n00:00:0")
    assert srt.count(" --> ") == vtt.count(" --> ") == sum(bool(each.text.strip()) for each in timed.segments)


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # the client deprecates translations
def test_translations(client: openai.OpenAI, llm: LanguageModel) -> None:
    expected = llm.transcribe(stored(SHORT), task="translate", temperature=0.3)
    options = {"model": "whisper", "file": ("a.wav", wav(SHORT)), "temperature": 0.3}
    assert client.audio.translations.create(**options).text == expected.text
    verbose = client.audio.translations.create(**options, response_format="verbose_json")
    assert verbose.language == "english" and verbose.duration == 0.9


def test_streams_have_an_event_per_window(client: openai.OpenAI, llm: LanguageModel) -> None:
    options = {"model": "whisper", "file": ("a.wav", wav(LONG)), "temperature": 0.5}
    events = list(client.audio.transcriptions.create(**options, stream=True))
    deltas = [event.delta for event in events if event.type == "transcript.text.delta"]
    assert events[-1].type == "transcript.text.done" and len(events) == len(deltas) + 1 > 2
    assert "".join(deltas) == events[-1].text == llm.transcribe(stored(LONG), temperature=0.5).text


@pytest.mark.parametrize(
    ("fields", "status", "param", "message"),
    [
        ({"model": "text"}, 404, "model", "'text' reads no audio; use a Whisper model"),
        ({"model": "nothing"}, 404, "model", "there is no model 'nothing'"),
        ({"language": "klingon"}, 400, "language", "not a language of this model"),
        ({"temperature": "2"}, 400, "temperature", 'temperature="2" must be at most 1; lower it'),
        ({"temperature": "nan"}, 400, "temperature", "temperature"),
        ({"response_format": "diarized_json"}, 400, "response_format", "json"),
        ({"stream": "true", "response_format": "srt"}, 400, None, "a stream has no response_format=srt"),
        ({"timestamp_granularities[]": "word", "response_format": "verbose_json"}, 400, None, "of words are not"),
        ({"timestamp_granularities[]": "segment"}, 400, None, "needs response_format=verbose_json"),
        ({"include[]": "logprobs"}, 400, "include[]", "unsupported parameter 'include[]'"),
        ({"languages": "de"}, 400, "languages", "parameter 'languages'; did you mean 'language'?"),
        ({"chunking_strategy": "auto"}, 400, "chunking_strategy", "unsupported parameter 'chunking_strategy'"),
    ],
)
def test_wrong_forms_are_refused_by_name(
    web: httpx.Client, fields: dict[str, str], status: int, param: str | None, message: str
) -> None:
    files = {"file": ("a.wav", wav(SHORT), "audio/wav")}
    response = web.post("/v1/audio/transcriptions", data={"model": "whisper"} | fields, files=files)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param) and message in error["message"]


@pytest.mark.parametrize(
    ("data", "status", "message"),
    [
        (b"ID3" + bytes(500), 400, "the file cannot be read: not a WAV file"),
        (wav(SHORT)[:30], 400, "the file cannot be read"),
        (wav(SHORT[:0]), 400, "no samples"),
        (wav(noise(0.05), 1000) + b"[" * 20_000, 200, ""),
        (bytes(200_001), 413, "the body is longer than 200000 bytes"),
    ],
)
def test_bad_files_are_refused(web: httpx.Client, data: bytes, status: int, message: str) -> None:
    response = web.post("/v1/audio/transcriptions", data={"model": "whisper"}, files={"file": ("a.wav", data)})
    if not message:  # bytes that look like JSON are no reason to refuse a file
        assert response.status_code == 200
    else:
        assert response.status_code == status and message in response.json()["error"]["message"]


def test_other_bodies_and_routes_are_refused(web: httpx.Client) -> None:
    path, form = "/v1/audio/transcriptions", {"content-type": "multipart/form-data; boundary=x"}
    for response in (
        web.post(path, json={"model": "whisper"}),
        web.post(path, data={"model": "whisper"}),
        web.post(path, data={"model": "whisper", "file": "text"}),
        web.post(path, content=b"--x\r\nbroken", headers=form),
        web.post(path, content=b"\xff" * 100, headers={"content-type": "multipart/form-data"}),
        web.post("/v1/audio/translations", data={"model": "whisper", "stream": "true"}, files={"file": wav(SHORT)}),
    ):
        assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"
    for path, body in (
        ("/v1/completions", {"model": "whisper", "prompt": "a"}),
        ("/v1/embeddings", {"model": "whisper", "input": "a"}),
    ):
        assert web.post(path, json=body).status_code == 404
    refused = web.post("/v1/completions", json={"model": "whisper", "prompt": "a"}).json()["error"]["message"]
    assert "use /v1/audio/transcriptions" in refused
    chat = {"model": "whisper", "messages": [{"role": "user", "content": "a"}]}
    assert web.post("/v1/chat/completions", json=chat).status_code == 400


def test_a_disconnected_client_frees_the_engine(web: httpx.Client, whisper: LanguageModel) -> None:
    files = {"file": ("a.wav", wav(noise(5.0, 3)), "audio/wav")}
    fields = {"model": "whisper", "temperature": "1", "stream": "true"}
    with web.stream("POST", "/v1/audio/transcriptions", data=fields, files=files) as response:
        first = next(line for line in response.iter_lines() if line)
        assert json.loads(first.removeprefix("data: "))["type"] == "transcript.text.delta"
    wait_until(lambda: whisper.engine.idle)
    for _ in range(MAX_AUDIO_REQUESTS):  # those that have ended do not count
        assert web.post("/v1/audio/transcriptions", data={"model": "whisper"}, files={"file": b"x"}).status_code == 400
    again = web.post("/v1/audio/transcriptions", data={"model": "whisper"}, files={"file": ("a.wav", wav(SHORT))})
    assert again.status_code == 200


def test_the_memory_of_all_audio_is_bounded(web: httpx.Client, served: ServedModel) -> None:
    thread, form = served.audio_thread, {"data": {"model": "whisper"}, "files": {"file": ("a.wav", wav(LONG))}}
    needed = SpeechDecoder(served.speech, LONG, TranscriptionSettings()).features.nbytes
    assert served.speech.feature_bytes(1.6) == needed  # counted before they are computed
    with thread.hold(thread.max_bytes - needed):
        assert web.post("/v1/audio/transcriptions", **form).status_code == 200
        with thread.hold(1):
            response = web.post("/v1/audio/transcriptions", **form)
            error = response.json()["error"]
            assert (response.status_code, response.headers["retry-after"], error["code"]) == (429, "10", "queue_full")
            assert "of 1024 MiB for the audio" in error["message"]
    assert (thread.requests, thread.held_bytes) == (0, 0)
    with thread.hold(2 * thread.max_bytes):  # the only request may keep any number
        pass


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (QueueFull("full"), 429, "queue_full"),
        (ValueError("no such adapter"), 400, "invalid_value"),
        (EngineStopped(SHUTTING_DOWN), 503, "shutting_down"),
    ],
)
def test_a_stream_that_the_engine_refuses_has_its_status(
    web: httpx.Client, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int, code: str
) -> None:
    async def refuse(self: AsyncEngine, handles: list) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(AsyncEngine, "submit", refuse)
        fields, files = {"model": "whisper", "stream": "true"}, {"file": ("a.wav", wav(SHORT))}
        for _ in range(MAX_AUDIO_REQUESTS + 1):  # those that were refused do not count
            response = web.post("/v1/audio/transcriptions", data=fields, files=files)
            assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert web.post("/v1/audio/transcriptions", data=fields, files=files).text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("stop", [lambda engine: engine.cancel_all(SHUTTING_DOWN), AsyncEngine.close])
def test_a_stream_that_waits_for_the_queue_ends_with_the_engine(
    llm: LanguageModel, monkeypatch: pytest.MonkeyPatch, stop: Callable
) -> None:
    served, checks = generating_model("whisper", Path("whisper"), llm), list[int]()

    def is_full(requests: int) -> None:
        checks.append(requests)
        if len(checks) > 2:  # not for the form and for the first window
            raise QueueFull("full")

    monkeypatch.setattr(served.engine, "check_queue", is_full)
    fields, files = {"model": "whisper", "stream": "true"}, {"file": ("a.wav", wav(LONG))}
    with (
        serve(create_app([served])) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as web,
        web.stream("POST", "/v1/audio/transcriptions", data=fields, files=files) as response,
    ):
        wait_until(lambda: len(checks) > 3)
        stop(served.engine)
        lines = [line for line in response.iter_lines() if line]
    assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert lines[-1] == "data: [DONE]"
