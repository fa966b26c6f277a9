"""Encoder-decoders that read a signal, such as Whisper: batched requests equal `transformers`, token for token."""

import pytest
import torch
import transformers

from regard.checkpoint import model_folder
from regard.engine.engine import Engine
from regard.engine.request import Sampling
from tests.engine.pools import small_store

MELS, FRAMES, VOCAB = 12, 40, 61
CONFIG = {
    "vocab_size": VOCAB, "num_mel_bins": MELS, "d_model": 32, "max_source_positions": FRAMES // 2,
    "max_target_positions": 48, "encoder_layers": 2, "encoder_ffn_dim": 40, "encoder_attention_heads": 4,
    "decoder_layers": 2, "decoder_ffn_dim": 40, "decoder_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 3, "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def reference() -> transformers.WhisperForConditionalGeneration:
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**CONFIG)).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in name:
                parameter *= 12  # so that the tokens depend clearly on the signal
    return model


@pytest.fixture(scope="module")
def model(reference, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("whisper")
    reference.save_pretrained(folder)
    return model_folder.load(folder, "cpu", torch.float64)


def signal(seed: int) -> torch.Tensor:
    return torch.randn(MELS, FRAMES, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def expected(reference, features: torch.Tensor, prompt: list[int], new: int) -> list[int]:
    tokens = torch.tensor([prompt])
    encoded = reference.model.encoder(features.unsqueeze(0))
    for _ in range(new):
        logits = reference(encoder_outputs=encoded, decoder_input_ids=tokens).logits[0, -1]
        tokens = torch.cat([tokens, logits.argmax().view(1, 1)], 1)
    return tokens[0, len(prompt) :].tolist()


@pytest.mark.parametrize("store", ["contiguous", "paged"])
def test_batched_signals_equal_transformers(model, reference, store: str) -> None:
    engine = Engine(model, rows=3, capacity=24, store=small_store(store, 8))
    jobs = [(signal(i), [3, 5 + i % 3, 9][: 1 + i % 3], 3 + i) for i in range(7)]
    requests = []
    for features, prompt, new in jobs:
        requests.append(engine.submit(prompt, Sampling(max_new=new, temperature=0), features))
        engine.step()
    while not engine.idle:
        engine.step()
    found = [[token.id for token in request.new] for request in requests]
    assert found == [expected(reference, *job) for job in jobs]
    assert len({tuple(tokens[:3]) for tokens in found}) > 3  # the signal matters


def test_greedy_generation_equals_the_generate_of_transformers(model, reference) -> None:
    inputs = torch.stack([signal(i) for i in range(3)])
    prompt = torch.tensor([[3, 7]] * 3)
    generated = transformers.GenerationMixin.generate(
        reference, input_features=inputs, decoder_input_ids=prompt, max_new_tokens=12, do_sample=False
    )
    engine = Engine(model, rows=3)
    for features, tokens in zip(inputs, generated.tolist(), strict=True):
        new = engine.generate([3, 7], Sampling(max_new=12, temperature=0, stop_ids=(2,)), features)
        whole = tokens[2:]
        assert [token.id for token in new] == (whole[: whole.index(2) + 1] if 2 in whole else whole)


def test_other_sources_are_refused(model) -> None:
    engine = Engine(model, capacity=16)
    for source, found in [(None, "type NoneType"), ([1, 2], "type list"), (signal(0)[:, 1:], r"shape \(12, 39\)")]:
        with pytest.raises(ValueError, match=rf"the source has {found}; this model reads a signal.* \(12, 40\)"):
            engine.submit([3], Sampling(), source)
