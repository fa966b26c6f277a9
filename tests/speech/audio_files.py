"""Audio without speech, as samples and as WAV files."""

import io
import wave

import torch


def noise(seconds: float, seed: int = 0) -> torch.Tensor:
    """(T,) samples at 16 kHz of changing loudness and pitch."""
    generator = torch.Generator().manual_seed(seed)
    time = torch.arange(int(16000 * seconds)) / 16000
    tones = torch.sin(2 * torch.pi * (300 + 200 * seed + 90 * torch.sin(3 * time)) * time)
    return (0.3 * tones + 0.05 * torch.randn(len(time), generator=generator)) * (1 + torch.sin(5 * time)) / 2


def wav(samples: torch.Tensor, rate: int = 16000) -> bytes:
    """A file with samples of 16 bits."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples * 32767).to(torch.int16).numpy().tobytes())
    return buffer.getvalue()


def stored(samples: torch.Tensor) -> torch.Tensor:
    """The samples as `wav` rounds them."""
    return (samples * 32767).to(torch.int16) / 32768
