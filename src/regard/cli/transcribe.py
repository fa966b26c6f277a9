"""`regard transcribe`: the text, or subtitles, of audio files by a Whisper model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from regard.cli.open_model import DeviceOption, ModelArgument
from regard.find_model import find_model

if TYPE_CHECKING:
    from regard.speech.transcription import Transcription

TranscriptFormat = Literal["text", "srt", "vtt", "json"]
BATCH = 8  # files whose windows are decoded together; their results are written before the next files are read
SUFFIXES = {"text": ".txt", "srt": ".srt", "vtt": ".vtt", "json": ".json"}


def transcribe(
    model: ModelArgument,
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="WAV files.")],
    language: Annotated[
        str | None, typer.Option(help="The language that is spoken, such as de or german; default: detected.")
    ] = None,
    translate: Annotated[bool, typer.Option("--translate", help="Translate into English.")] = False,
    timestamps: Annotated[
        bool, typer.Option("--timestamps", help="With --format text: a line per segment, after its start and end.")
    ] = False,
    prompt: Annotated[str | None, typer.Option(help="Text that precedes the audio: names, spellings, style.")] = None,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, help="Default: 0, and higher where the text repeats itself or is unlikely."),
    ] = None,
    format: Annotated[
        TranscriptFormat, typer.Option(help="text, srt or vtt (subtitles), or json (with all segments).")
    ] = "text",
    output: Annotated[
        Path | None, typer.Option(help="A folder to write FILE.txt, .srt, .vtt or .json into; default: print.")
    ] = None,
    device: DeviceOption = "auto",
) -> None:
    """Transcribe audio files with a Whisper model; several files are decoded in one batch.

    Convert other formats to WAV before: ffmpeg -i talk.mp3 -ar 16000 -ac 1 talk.wav

    \b
    Examples:
      regard transcribe models/whisper-small talk.wav
      regard transcribe models/whisper-small talk.wav --language de --translate
      regard transcribe models/whisper-small *.wav --format srt --output subtitles
    """
    find_model(model)  # before torch is imported: a mistyped name is refused at once
    if missing := [file for file in files if not file.is_file()]:
        raise typer.BadParameter(f"there is no file {missing[0]}")
    if output is not None and len({file.stem for file in files}) < len(files):
        raise typer.BadParameter("several files have the same name, so they cannot be written into one folder")
    from regard.load_model import load
    from regard.speech.transcription import TranscriptionOptions, temperature_fallback

    task = "translate" if translate else "transcribe"
    options: TranscriptionOptions = temperature_fallback() if temperature is None else {"temperature": temperature}
    options |= {"language": language, "task": task, "prompt": prompt, "timestamps": timestamps or format != "text"}
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
    llm = load(model, device)
    for start in range(0, len(files), BATCH):
        batch = files[start : start + BATCH]
        for file, transcription in zip(batch, llm.transcribe(batch, **options), strict=True):
            text = formatted(transcription, format, task, timestamps)
            if output is None:
                typer.echo(f"{file}\n" if len(files) > 1 and format != "json" else "", nl=False)
                typer.echo(text, nl=False)
            else:
                path = output / (file.stem + SUFFIXES[format])
                path.write_text(text, "utf-8")
                typer.echo(path)


def formatted(transcription: "Transcription", format: TranscriptFormat, task: str, timestamps: bool) -> str:
    from regard.speech.subtitles import as_json, plain_text, srt, timed_text, vtt

    if format == "json":
        return as_json(transcription, task)
    return {"text": timed_text if timestamps else plain_text, "srt": srt, "vtt": vtt}[format](transcription)
