"""Audio and video as tokens: frames equal a loop, AST and Whisper equal `transformers`, and models learn the order."""

import pytest
import torch
from torch import Tensor

from regard.data.batch import Batch
from regard.engine.stores.paged import Paged
from regard.kernels.attention.mask import Full
from regard.layout import TokenLayout
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.heads import Classification
from regard.models.presets import pre_norm_block
from regard.models.stack import Repeat
from regard.objectives.classification import classification
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.cross_attention import CrossAttention
from regard.parts.feedforward import FeedForward
from regard.parts.frames import Frames
from regard.parts.input import Input
from regard.parts.norm import LayerNorm
from regard.parts.patches import Patches
from regard.parts.position.learned import Learned
from regard.spec import SpecError
from regard.training.optimizer import AdamW
from regard.training.step import take_step
from tests.laws import error, random_ids
from tests.models.reference_weights import PROJECTIONS, fill, randomized, renamed

AST = {
    r"^embeddings\.position_embeddings": "position.table.weight",
    r"^embeddings\.patch_embeddings\.projection\.": "input.proj.",
    r"^layers\.": "stack.blocks.",
    r"^layernorm\.": "norm.",
    **PROJECTIONS,
}
WHISPER = {
    r"^model\.encoder\.conv(\d)\.": lambda match: f"source.input.convolutions.{int(match[1]) - 1}.",
    r"^model\.encoder\.layers\.": "source.stack.blocks.",
    r"^model\.decoder\.layers\.": "target.stack.blocks.",
    r"^model\.encoder\.embed_positions\.": "source.position.table.",
    r"^model\.decoder\.embed_positions\.": "target.position.table.",
    r"^model\.decoder\.embed_tokens\.": "target.embedding.",
    r"^model\.encoder\.layer_norm\.": "source.norm.",
    r"^model\.decoder\.layer_norm\.": "target.norm.",
    r"self_attn_layer_norm\.": "sublayers.0.norm.",
    r"encoder_attn_layer_norm\.": "sublayers.1.norm.",
    r"self_attn\.out_proj\.": "sublayers.0.body.o_proj.",
    r"encoder_attn\.out_proj\.": "sublayers.1.body.o_proj.",
    r"self_attn\.": "sublayers.0.body.",
    r"encoder_attn\.": "sublayers.1.body.",
    r"(source\S*)final_layer_norm\.": r"\1sublayers.1.norm.",
    r"(target\S*)final_layer_norm\.": r"\1sublayers.2.norm.",
    r"(source\S*)fc1\.": r"\1sublayers.1.body.up_proj.",
    r"(target\S*)fc1\.": r"\1sublayers.2.body.up_proj.",
    r"(source\S*)fc2\.": r"\1sublayers.1.body.down_proj.",
    r"(target\S*)fc2\.": r"\1sublayers.2.body.down_proj.",
}


@pytest.mark.parametrize("strides", [(1,), (2, 3)])
def test_frames_equal_a_loop(strides: tuple[int, ...]) -> None:
    """Each output is a sum over the neighbours of a frame, with zeros beyond both ends."""
    module = Frames(2, strides, 3, "identity").build(4).double()
    signal = torch.randn(2, 11, dtype=torch.float64)
    expected = signal
    for convolution, stride in zip(module.convolutions, strides, strict=True):
        columns = []
        for centre in range(0, expected.shape[1], stride):
            taps = [(tap, centre + tap - 1) for tap in range(3) if 0 <= centre + tap - 1 < expected.shape[1]]
            columns.append(convolution.bias + sum(convolution.weight[:, :, tap] @ expected[:, t] for tap, t in taps))
        expected = torch.stack(columns, 1)
    assert error(module(signal.unsqueeze(0))[0], expected.T) <= 1e-12
    signal = signal.unsqueeze(0).requires_grad_()
    assert torch.autograd.gradcheck(module, (signal,), fast_mode=True)


def test_wrong_specs_are_refused() -> None:
    with pytest.raises(SpecError, match="kernel=2 must be odd"):
        Frames(kernel=2)
    with pytest.raises(SpecError, match=r"strides=\(\) must be positive"):
        Frames(strides=())
    with pytest.raises(ValueError, match=r"a signal of shape \(3, 9\) was given; this model takes \(2, frames\)"):
        Frames(2).build(4)(torch.zeros(1, 3, 9))


FIRST_TOKENS = {"cls": "cls", "registers": "distillation"}


@pytest.mark.ledger("mm.audio")
def test_audio_spectrogram_transformer_equals_transformers() -> None:
    """Overlapping patches of a spectrogram, after [CLS] and a distillation token."""
    import transformers

    config = transformers.ASTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40, max_length=50, num_mel_bins=64
    )
    theirs = randomized(transformers.ASTModel(config))
    tensors = renamed(dict(theirs.named_parameters()), AST)
    first_tokens = {f"input.{ours}": tensors.pop(f"embeddings.{name}_token") for ours, name in FIRST_TOKENS.items()}
    patches, norm = Patches((16, 16), (64, 50), channels=1, stride=(10, 10), registers=1), LayerNorm(1e-12)
    block = pre_norm_block(4, 40, norm, Full(), "gelu")
    spec = Encoder(patches, 24, (Repeat((block,), 2),), Learned(patches.length), norm=norm)
    ours = fill(spec.build(), tensors | first_tokens)
    signal = torch.randn(2, 50, 64, dtype=torch.float64)  # (batch, time, bins), as AST expects it
    assert patches.grid == (5, 4)
    assert error(ours(signal.mT.unsqueeze(1)), theirs(signal).last_hidden_state) <= 1e-12


@pytest.mark.ledger("mm.audio")
def test_whisper_equals_transformers() -> None:
    """Logits, and decoding with a cache; the bias of keys is zero, because Whisper has none."""
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=31, d_model=24, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=40, decoder_ffn_dim=40, num_mel_bins=10, max_source_positions=8,
        max_target_positions=12, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    theirs = randomized(transformers.WhisperForConditionalGeneration(config))
    norm = LayerNorm()
    self_attention = Sublayer(Attention(4, bias=True), norm)
    cross_attention = Sublayer(CrossAttention(4, bias=True), norm)
    decoder_block = Block((self_attention, cross_attention, Sublayer(FeedForward(40), norm)))
    spec = EncoderDecoder(
        Encoder(Frames(10), 24, (Repeat((pre_norm_block(4, 40, norm, Full(), "gelu"),), 2),), Learned(8), norm=norm),
        Decoder(31, 24, (Repeat((decoder_block,), 2),), Learned(12), norm=norm),
    )
    tensors = renamed(dict(theirs.named_parameters()), WHISPER)
    keys = [name for name in tensors if name.endswith("k_proj.weight")]
    biases = {name.replace("weight", "bias"): torch.zeros(24) for name in keys}
    ours = fill(spec.build(), tensors | biases)
    signal, tokens = torch.randn(2, 10, 16, dtype=torch.float64), random_ids(2, 9)
    expected = theirs(signal, decoder_input_ids=tokens).logits
    assert error(ours(signal, tokens), expected) <= 1e-12
    store = Paged(spec.memory(), 2, 12, torch.float64, block=4, source=8, blocks=8)
    assert all(store.reserve(row, 12) for row in range(2))
    with torch.no_grad():
        for t in range(9):
            layout = TokenLayout(torch.full((2, 1), t))
            step = ours(
                signal if t == 0 else None, tokens[:, t : t + 1], layout=layout, states=store.begin_forward(layout)
            )
            assert error(step[:, 0], expected[:, t]) <= 1e-9


def classifier(input: Input, tokens: int, labels: int = 2) -> Encoder:
    block = pre_norm_block(4, 48, LayerNorm(), Full(), "gelu")
    return Encoder(input, 24, (Repeat((block,), 2),), Learned(tokens), norm=LayerNorm(), head=Classification(labels))


def random_tones(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Spectrograms (32, 1, 8 bins, 16 frames) of two tones; the label is 1 if the second is higher."""
    low = torch.randint(0, 4, (32,), generator=generator)
    high = torch.randint(4, 8, (32,), generator=generator)
    rises = torch.randint(2, (32,), generator=generator)
    first, second = torch.where(rises == 1, low, high), torch.where(rises == 1, high, low)
    signal = 0.2 * torch.randn(32, 1, 8, 16, generator=generator)
    for row in range(32):
        signal[row, 0, first[row], :8] += 1.0
        signal[row, 0, second[row], 8:] += 1.0
    return signal, rises


def random_tones_as_frames(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    signal, rises = random_tones(generator)
    return signal.squeeze(1), rises


def random_moving_dots(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Videos (32, 1, 4 frames, 4, 8) of a moving dot; the label is 1 if it moves to the right."""
    right = torch.randint(2, (32,), generator=generator)
    start, height = (torch.randint(n, (32,), generator=generator) for n in (5, 4))
    video = 0.1 * torch.randn(32, 1, 4, 4, 8, generator=generator)
    for row in range(32):
        for t in range(4):
            video[row, 0, t, height[row], start[row] + (t if right[row] else 3 - t)] += 2.0
    return video, right


TASKS = {  # name: random batch, input, number of tokens
    "tones in patches": (random_tones, Patches((8, 4), (8, 16), channels=1), 5),
    "tones in frames": (random_tones_as_frames, Frames(8, (2, 2)), 4),
    "a moving dot": (random_moving_dots, Patches((1, 4, 4), (4, 4, 8), channels=1), 9),
}


@pytest.mark.ledger("mm.audio")
@pytest.mark.parametrize("name", TASKS)
def test_a_model_learns_the_order_of_frames(name: str) -> None:
    random_batch, input, tokens = TASKS[name]
    model, generator = classifier(input, tokens).build(0), torch.Generator().manual_seed(0)
    optimizer, steps = AdamW().build(model, lr=3e-3), []
    for _ in range(100):
        signal, labels = random_batch(generator)
        steps.append(take_step(model, classification, Batch(images=signal, labels=labels), optimizer, clip=1.0))
    assert sum(step["accuracy"] for step in steps[-5:]) / 5 > 0.9
