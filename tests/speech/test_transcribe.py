"""Transcriptions equal those of `transformers`, token for token: short and long audio, prompts, silence."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import regard
from regard.audio import Audio
from regard.language_model import LanguageModel
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.speech.transcription import Transcription, temperature_fallback
from regard.text.train import byte
from tests.speech.audio_files import noise, stored, wav
from tests.speech.tiny_whisper import GENERATION, MELS, SPECIAL, VOCAB, WINDOW, write_tiny_whisper

EXTRACTOR = transformers.WhisperFeatureExtractor(feature_size=MELS, chunk_length=WINDOW // 100)
BEGIN = SPECIAL["notimestamps"] + 1


def expected(reference: Any, samples: torch.Tensor, **options: Any) -> list[tuple[float, float, tuple[int, ...]]]:
    """The segments of `generate`. The last one of a window has the timestamp after it too, which is removed."""
    long = len(samples) > WINDOW * 160
    padding: dict[str, Any] = {"truncation": False, "padding": "longest"} if long else {}
    features = EXTRACTOR(samples.numpy(), sampling_rate=16000, return_tensors="pt", **padding).input_features
    settings = {"task": "transcribe", "return_segments": True} | options
    if not options["return_timestamps"]:  # our rules exclude timestamps then, as training does
        settings["suppress_tokens"] = [*GENERATION["suppress_tokens"], *range(BEGIN, VOCAB)]
    segments = reference.generate(features, **settings)["segments"][0]
    ids = [segment["tokens"].tolist() for segment in segments]
    ids = [each[:-1] if len(each) > 1 and min(each[-2:]) >= BEGIN else each for each in ids]
    end = len(samples) / 16000
    times = [(min(float(segment["start"]), end), min(float(segment["end"]), end)) for segment in segments]
    return [(*time, tuple(each)) for time, each in zip(times, ids, strict=True)]


def check(found: Transcription, segments: list[tuple[float, float, tuple[int, ...]]]) -> None:
    assert [segment.tokens for segment in found.segments] == [ids for _, _, ids in segments]
    times = [time for segment in found.segments for time in segment[:2]]
    assert times == pytest.approx([time for segment in segments for time in segment[:2]])


@pytest.mark.parametrize("timestamps", [False, True])
def test_audio_of_one_window_equals_transformers(llm: LanguageModel, reference: Any, timestamps: bool) -> None:
    inputs = [noise(1.0, seed) for seed in range(3)]
    found = llm.transcribe(inputs, timestamps=timestamps)
    for transcription, samples in zip(found, inputs, strict=True):
        check(transcription, expected(reference, samples, return_timestamps=timestamps))
    assert len({transcription.text for transcription in found}) == 3  # the audio matters
    assert sum(len(transcription.segments) for transcription in found) > (6 if timestamps else 2)


def test_long_audio_equals_transformers(llm: LanguageModel, reference: Any) -> None:
    inputs = [noise(seconds, seed) for seed, seconds in enumerate([1.05, 2.5, 4.37])]
    found = llm.transcribe(inputs)
    for transcription, samples in zip(found, inputs, strict=True):
        check(transcription, expected(reference, samples, return_timestamps=True))
        assert transcription.duration == len(samples) / 16000
    assert max(segment.seek for segment in found[2].segments) > 3 * WINDOW
    text = "".join(segment.text for segment in found[2].segments)
    assert found[2].text == text.strip() and "<|" not in text


@pytest.mark.parametrize("language", [None, "german", "fr"])
def test_prompts_languages_and_tasks_equal_transformers(llm: LanguageModel, reference: Any, language: Any) -> None:
    samples = noise(1.9, 5)
    found = llm.transcribe(samples, language=language, task="translate", prompt=" Anna, Tom")
    prompt = torch.tensor([SPECIAL["startofprev"], *llm.tokenizer.encode(" Anna, Tom")])
    options = {"task": "translate", "prompt_ids": prompt, "return_timestamps": True}
    segments = expected(reference, samples, **options, **({} if language is None else {"language": language}))
    check(found, [segment for segment in segments if segment[2] != tuple(prompt.tolist()[1:])])
    features = EXTRACTOR(samples.numpy(), sampling_rate=16000, return_tensors="pt").input_features
    detected = llm.tokenizer.decode_token(int(reference.detect_language(features)))
    assert found.language == {"german": "de"}.get(str(language), language or detected[2:-2])


def test_silence_equals_transformers(llm: LanguageModel, reference: Any) -> None:
    """A window is silent if its text is unlikely and <|nospeech|> likely."""
    samples = noise(2.1, 7)
    plain = llm.transcribe(samples)
    windows = sorted({segment.seek: segment.no_speech_prob for segment in plain.segments}.values())
    for low in (-1e9, 0.0):
        options = {"logprob_threshold": low, "no_speech_threshold": windows[len(windows) // 2] * 0.999}
        found = llm.transcribe(samples, **options)
        check(found, expected(reference, samples, return_timestamps=True, temperature=(0.0,), **options))
        assert (found == plain) == (low < -1)


@torch.no_grad()
def test_log_probabilities_equal_transformers(llm: LanguageModel, reference: Any) -> None:
    samples = noise(1.0, 4)
    first = llm.transcribe(samples, timestamps=True, language="en").segments[0]
    features = EXTRACTOR(samples.numpy(), sampling_rate=16000, return_tensors="pt").input_features
    settings = {"language": "en", "return_timestamps": True, "return_dict_in_generate": True, "output_scores": True}
    result = reference.generate(features, **settings, force_unique_generate_call=True)
    mean = reference._retrieve_avg_logprobs([each[0] for each in result["scores"]], result["sequences"][0], 0.0)
    assert first.avg_logprob == pytest.approx(float(mean), abs=1e-5)
    start = reference(features, decoder_input_ids=torch.tensor([[SPECIAL["startoftranscript"]]])).logits[0, 0]
    assert first.no_speech_prob == pytest.approx(float(start.softmax(-1)[SPECIAL["nospeech"]]), rel=1e-5)


def test_fallback_raises_the_temperature(llm: LanguageModel) -> None:
    samples = noise(1.0, 1)
    options = {"temperature": (0.0, 0.5, 1.0), "compression_ratio_threshold": 0.0}
    found = llm.transcribe(samples, **options)
    assert {segment.temperature for segment in found.segments} == {1.0}  # every text is above the threshold
    assert llm.transcribe(samples, **options) == found  # by its seed
    assert llm.transcribe(samples, **options, seed=1) != found
    low = llm.transcribe(
        samples, **temperature_fallback() | {"compression_ratio_threshold": 99.0, "logprob_threshold": -99.0}
    )
    assert low == llm.transcribe(samples)


def test_files_and_arrays(llm: LanguageModel, tmp_path: Path) -> None:
    samples = noise(0.8, 2)
    path, values = tmp_path / "speech.wav", (samples * 32767).to(torch.int16)
    path.write_bytes(wav(samples))
    found = llm.transcribe([path, str(path), stored(samples).numpy(), Audio(stored(samples), 16000)])
    assert all(each == found[0] for each in found) and found[0].duration == 0.8
    halved = llm.transcribe(Audio(stored(samples[::2]), 8000))
    assert halved.duration == 0.8
    for audio, reason in [
        (values, "type torch.int16; give one channel of floats"),
        (samples.view(2, -1), r"shape \(2, 6400\)"),
        (samples[:0], "no samples"),
        (torch.full((9,), torch.nan), "not finite"),
    ]:
        with pytest.raises(ValueError, match=reason):
            llm.transcribe(audio)
    (tmp_path / "text.wav").write_text("no audio")
    with pytest.raises(ValueError, match=r"text\.wav: not a WAV file"):
        llm.transcribe(tmp_path / "text.wav")


def test_wrong_options_are_refused(llm: LanguageModel) -> None:
    samples = noise(0.1)
    for options, reason in [
        ({"language": "english?"}, "did you mean 'english'"),
        ({"language": "it"}, "not a language of this model"),
        ({"task": "summarize"}, "must be one of transcribe, translate"),
        ({"temperature": ()}, "must be a number of at least 0"),
        ({"temperature": -1}, "must be a number of at least 0"),
        ({"max_new_tokens": 0}, "must be a positive integer"),
        ({"no_speech_threshold": "x"}, "must be a number, or None"),
    ]:
        with pytest.raises(ValueError, match=reason):
            llm.transcribe(samples, **options)
    with pytest.raises(TypeError, match="no option 'lang' of transcribe; did you mean 'language'"):
        llm.transcribe(samples, lang="en")  # ty: ignore
    assert len(llm.transcribe(samples, language="en", max_new_tokens=3).segments[0].tokens) == 3


def test_tokens_from_the_vocabulary_and_models_of_english(llm: LanguageModel, tmp_path: Path) -> None:
    """Older folders name no languages and tasks in their generation config; those of English have none."""
    names = ("lang_to_id", "task_to_id", "no_timestamps_token_id", "prev_sot_token_id", "is_multilingual")
    write_tiny_whisper(tmp_path / "old", **dict.fromkeys(names))
    samples, options = noise(1.3, 3), {"prompt": "Anna", "task": "translate"}
    old = regard.load(tmp_path / "old", device="cpu")
    assert old.transcribe(samples, **options) == llm.transcribe(samples, **options)
    reference = write_tiny_whisper(tmp_path / "english", is_multilingual=False, lang_to_id=None, task_to_id=None)
    english = regard.load(tmp_path / "english", device="cpu")
    found = english.transcribe(samples, language="english")
    check(found, expected(reference, samples, task=None, return_timestamps=True))
    assert found.language == "en"
    with pytest.raises(ValueError, match="is English-only"):
        english.transcribe(samples, task="translate")
    for number, (name, value, token) in enumerate(
        [
            ("suppress_tokens", [1, 10**6], "1000000"),
            ("no_timestamps_token_id", "5", "'5'"),
            ("lang_to_id", {"<|en|>": 1, "<|de|>": "2"}, "'2'"),
        ]
    ):
        write_tiny_whisper(tmp_path / f"bad{number}", **{name: value})
        with pytest.raises(ValueError, match=f"names the token {token}; the model's ids are 0 to"):
            regard.load(tmp_path / f"bad{number}", device="cpu").transcribe(samples)


def test_other_models_are_refused() -> None:
    block = Block((Sublayer(Attention(heads=2)),))
    decoder = Decoder(vocab=byte().vocab_size, width=8, layers=(Repeat((block,)),), context=8).build(seed=0)
    with pytest.raises(ValueError, match="of kind decoder and reads no audio; transcribe with a Whisper model"):
        LanguageModel(decoder, byte()).transcribe(noise(0.1))
