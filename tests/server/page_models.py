"""Folders of small models of other kinds, saved by `transformers` with random weights, for walks through the page."""

from pathlib import Path

import torch
import transformers

from tests.families.cases.encoder_decoders import T5
from tests.families.cases.recurrent import BAMBA
from tests.speech.tiny_whisper import tokenizer

SIZES = {"vocab_size": 300, "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256}  # bytes and special tokens


def write_encoder_decoder(folder: Path) -> Path:
    """A T5."""
    config = transformers.T5Config(**T5 | SIZES, decoder_start_token_id=256)
    return write(transformers.T5ForConditionalGeneration, config, folder)


def write_hybrid(folder: Path) -> Path:
    """A Bamba: Mamba-2 with one layer of attention."""
    return write(transformers.BambaForCausalLM, transformers.BambaConfig(**BAMBA | SIZES), folder)


def write(model_class: type, config: transformers.PreTrainedConfig, folder: Path) -> Path:
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter *= 4  # so that attention is not uniform, and greedy output is not one repeated token
    model.save_pretrained(folder)
    names = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer(), **names).save_pretrained(folder)
    return folder
