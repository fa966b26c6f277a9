"""A small Whisper, as a folder, in `transformers` and loaded here."""

from pathlib import Path

import pytest
import transformers

import regard
from regard.language_model import LanguageModel
from tests.speech.tiny_whisper import write_tiny_whisper


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whisper")


@pytest.fixture(scope="package")
def reference(folder: Path) -> transformers.WhisperForConditionalGeneration:
    return write_tiny_whisper(folder)


@pytest.fixture(scope="package")
def llm(folder: Path, reference: transformers.WhisperForConditionalGeneration) -> LanguageModel:
    return regard.load(folder, device="cpu")
