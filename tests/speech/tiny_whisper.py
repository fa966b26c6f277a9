"""A small Whisper with random weights and windows of one second, saved by `transformers`."""

from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

WINDOW, MELS = 100, 8  # frames of a window, channels
NAMES = ["endoftext", "startoftranscript", "en", "de", "fr", "translate", "transcribe", "startofprev", "nospeech"]
SPECIAL = {name: 256 + i for i, name in enumerate([*NAMES, "notimestamps"])}
TIMESTAMPS = [f"<|{i / 50:.2f}|>" for i in range(WINDOW // 2 + 1)]
VOCAB = 256 + len(SPECIAL) + len(TIMESTAMPS)
GENERATION = {
    "decoder_start_token_id": SPECIAL["startoftranscript"], "eos_token_id": SPECIAL["endoftext"],
    "pad_token_id": SPECIAL["endoftext"], "bos_token_id": SPECIAL["endoftext"], "is_multilingual": True,
    "lang_to_id": {f"<|{code}|>": SPECIAL[code] for code in ("en", "de", "fr")},
    "task_to_id": {task: SPECIAL[task] for task in ("translate", "transcribe")},
    "no_timestamps_token_id": SPECIAL["notimestamps"], "prev_sot_token_id": SPECIAL["startofprev"],
    "suppress_tokens": [*range(128, 256), *(SPECIAL[name] for name in NAMES[1:])],
    "begin_suppress_tokens": [32, SPECIAL["endoftext"]], "max_initial_timestamp_index": 25, "max_length": 30,
}  # fmt: skip


def tokenizer() -> tokenizers.Tokenizer:
    """Bytes, the special tokens, and the timestamps, which are not special, as in Whisper."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(models.BPE({letter: id for id, letter in enumerate(letters)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([f"<|{name}|>" for name in SPECIAL])
    core.add_tokens(TIMESTAMPS)
    return core


def write_tiny_whisper(folder: Path, **generation: Any) -> transformers.WhisperForConditionalGeneration:
    """generation: changes to the generation config; None removes a setting."""
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=VOCAB, num_mel_bins=MELS, d_model=32, max_source_positions=WINDOW // 2, max_target_positions=30,
        encoder_layers=2, encoder_ffn_dim=40, encoder_attention_heads=4, decoder_layers=2, decoder_ffn_dim=40,
        decoder_attention_heads=4, pad_token_id=256, bos_token_id=256, eos_token_id=256, decoder_start_token_id=257,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter *= 4 if "embed" in name else 24  # so that the tokens depend clearly on the audio
    settings = {name: value for name, value in (GENERATION | generation).items() if value is not None}
    model.generation_config = transformers.GenerationConfig(**settings)
    model.save_pretrained(folder)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer(), eos_token="<|endoftext|>")
    fast.save_pretrained(folder)
    return model
