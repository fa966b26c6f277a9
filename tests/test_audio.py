"""Audio files, resampling against exact sines, and log-mel features against `transformers`."""

import io
import math
import tempfile
import wave

import numpy as np
import pytest
import torch
import transformers

from regard.audio import log_mel, read_wav, resample, wav_seconds


def wav(samples: np.ndarray, width: int, rate: int = 16000, channels: int = 1) -> bytes:
    """samples: integers of this many bytes."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        content = (samples + 128).astype(np.uint8) if width == 1 else samples.astype("<i4")
        raw = content.tobytes() if width == 1 else content.view(np.uint8).reshape(-1, 4)[:, :width].tobytes()
        file.writeframes(raw)
    return buffer.getvalue()


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_samples_of_every_width_are_read(width: int) -> None:
    largest = 2 ** (8 * width - 1)
    values = np.array([0, 1, -1, largest - 1, -largest, largest // 2], np.int64)
    audio = read_wav(wav(values, width, 8000))
    assert audio.rate == 8000 and audio.seconds == 6 / 8000
    np.testing.assert_allclose(audio.samples.double().numpy(), values / largest, atol=1e-7)


def test_channels_are_averaged_and_damaged_files_refused() -> None:
    stereo = wav(np.array([100, 300, -100, 100]), 2, channels=2)
    assert (read_wav(stereo).samples * 2**15).tolist() == [200, 0]
    for data, reason in [(b"", "not a WAV"), (b"ID3" + bytes(99), "not a WAV"), (stereo[:30], "not a WAV")]:
        with pytest.raises(ValueError, match=reason):
            read_wav(data)
    for read in (read_wav, wav_seconds):
        with pytest.raises(ValueError, match="2 seconds are too many; at most 1 fit"):
            read(wav(np.zeros(16000 * 2), 2), max_seconds=1)
    with tempfile.SpooledTemporaryFile() as file:  # as a server has it
        file.write(stereo)
        assert wav_seconds(file) == read_wav(file).seconds == 2 / 16000 and not file.closed


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000])
def test_resampling_keeps_sines_and_removes_what_would_be_folded(rate: int) -> None:
    def sine(frequency: float, rate: int, seconds: float = 0.5) -> torch.Tensor:
        return torch.sin(2 * math.pi * frequency * torch.arange(int(rate * seconds), dtype=torch.float64) / rate)

    inner = slice(400, -400)  # the ends lack samples on one side
    for frequency in (50.0, 440.0, 3100.0):
        found, expected = resample(sine(frequency, rate), rate, 16000), sine(frequency, 16000)
        assert len(found) == math.ceil(int(rate * 0.5) * 16000 / rate)
        assert (found[: len(expected)] - expected[: len(found)])[inner].abs().max() < 1e-3
    if rate > 20000:
        assert resample(sine(9000.0, rate), rate, 16000)[inner].abs().max() < 1e-3


@pytest.mark.parametrize("mels", [80, 128])
@pytest.mark.parametrize("seconds", [0.3, 2.7, 31.0])
def test_log_mel_features_equal_transformers(mels: int, seconds: float) -> None:
    generator = torch.Generator().manual_seed(0)
    samples = 0.1 * torch.randn(int(16000 * seconds), generator=generator)
    extractor = transformers.WhisperFeatureExtractor(feature_size=mels)
    expected = extractor(samples.numpy(), sampling_rate=16000, return_tensors="pt").input_features[0]
    found = log_mel(samples, mels)
    assert found.shape == expected.shape == (mels, 3000) and found.dtype == torch.float32
    assert (found - expected).abs().max() < 2e-5
