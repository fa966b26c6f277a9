"""`regard transcribe`: audio files as text, subtitles and JSON."""

import json
from pathlib import Path

import pytest

import regard as package
from regard.speech.transcription import temperature_fallback
from tests.cli.conftest import regard
from tests.speech.audio_files import noise, stored, wav
from tests.speech.tiny_whisper import write_tiny_whisper


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("transcribe")
    write_tiny_whisper(folder / "whisper")
    for seed, name in enumerate(("a.wav", "b.wav")):
        (folder / name).write_bytes(wav(noise(0.7 + seed, seed)))
    return folder


def test_formats(folder: Path, tmp_path: Path) -> None:
    command = ("transcribe", folder / "whisper", folder / "a.wav", "--device", "cpu")
    llm, samples = package.load(folder / "whisper", device="cpu"), stored(noise(0.7, 0))
    assert regard(*command).stdout == llm.transcribe(samples, **temperature_fallback()).text + "\n"
    options = {"language": "de", "prompt": "Anna", "task": "translate", "temperature": 0, "timestamps": True}
    timed = llm.transcribe(samples, **options)
    more = (*command, "--language", "german", "--prompt", "Anna", "--translate", "--temperature", 0)
    found = json.loads(regard(*more, "--format", "json").stdout)
    assert (found["text"], found["task"], found["language"]) == (timed.text, "translate", "english")
    assert [segment["tokens"] for segment in found["segments"]] == [[*segment.tokens] for segment in timed.segments]
    lines = regard(*more, "--timestamps").stdout.splitlines()
    spoken = [segment for segment in timed.segments if segment.text.strip()]
    assert len(lines) == len(spoken) > 0 and lines[0].startswith("[00:00:00.") and " --> " in lines[0]
    both = regard(*more, folder / "b.wav", "--format", "srt", "--output", tmp_path / "out")
    assert both.exit_code == 0, both.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.srt", "b.srt"]
    subtitles = (tmp_path / "out" / "a.srt").read_text("utf-8")
    assert subtitles.startswith("1\n00:00:00,") and subtitles.count(" --> ") == len(spoken)


def test_wrong_use_is_refused(folder: Path, tmp_path: Path) -> None:
    refused = regard("transcribe", folder / "whisper", folder / "none.wav")
    assert refused.exit_code == 2 and "there is no file" in refused.stderr
    (tmp_path / "a.wav").write_bytes(wav(noise(0.1)))
    twice = regard("transcribe", folder / "whisper", folder / "a.wav", tmp_path / "a.wav", "--output", tmp_path)
    assert twice.exit_code == 2 and "the same name" in twice.stderr


def test_results_are_written_before_later_files_are_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.cli.transcribe.BATCH", 1)
    (tmp_path / "damaged.wav").write_bytes(b"RIFF")
    files = (folder / "a.wav", tmp_path / "damaged.wav")
    stopped = regard("transcribe", folder / "whisper", *files, "--device", "cpu", "--output", tmp_path / "out")
    assert stopped.exit_code == 1 and "damaged.wav: not a WAV file" in str(stopped.exception)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a.txt"]
