"""The sizes of GPT-2's maps: as many rows as the text has tokens, because its tokenizer adds no opening token."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, pre_tokenizers, trainers

from regard.families.gpt2 import spec
from regard.lens import attention_heads, attention_maps
from regard.text.tokenizer import Tokenizer
from tests.text.folders import BERT, bert, write

SENTENCE = "The cat sat on the mat"


def gpt2_tokenizer(folder: Path) -> Tokenizer:
    """A byte-level BPE with GPT-2's rules and files; the words are common in its text, as they are in GPT-2's."""
    core = Core(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator([f"{SENTENCE}. On the mat sat the cat."] * 9, trainer)
    return Tokenizer.load(
        write(folder, core, tokenizer_config=dict.fromkeys(("bos_token", "eos_token"), "<|endoftext|>"))
    )


@pytest.mark.ledger("lens.gpt2")
def test_six_common_words_are_six_tokens_and_maps_are_12_6_6(tmp_path: Path) -> None:
    tokenizer = gpt2_tokenizer(tmp_path / "gpt2")
    ids = [*tokenizer.prefix_ids, *tokenizer.encode(SENTENCE)]
    assert [tokenizer.decode_token(id) for id in ids] == ["The", " cat", " sat", " on", " the", " mat"]
    assert tokenizer.encode_with_special_tokens(SENTENCE) == ids  # no opening token, though a bos is named
    config = {"model_type": "gpt2", "n_layer": 2, "n_head": 12, "n_embd": 48, "n_positions": 64, "vocab_size": 300}
    model = spec(config).build(seed=0).eval()
    assert attention_heads(model) == (12, 12)
    assert [tuple(weights.shape) for weights in attention_maps(model, ids)] == [(12, 6, 6)] * 2


def test_an_encoder_like_bert_adds_two_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path, bert(), tokenizer_config=BERT))
    assert len(tokenizer.encode_with_special_tokens(SENTENCE)) == len(tokenizer.encode(SENTENCE)) + 2
