"""Translation: shifted targets, weights, teacher forcing and training; and training on images with text."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import regard
from regard.data.batch import Batch
from regard.kernels.attention.mask import Full
from regard.layout import TokenLayout
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.interleaved import Interleaved
from regard.models.presets import transformer_2017
from regard.models.stack import Repeat
from regard.objectives.image_text import image_text
from regard.objectives.translation import Translation, translation, translation_batch
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.cross_attention import CrossAttention
from regard.parts.feedforward import SwiGLU
from regard.parts.patches import Patches
from regard.parts.position.learned import Learned
from regard.parts.position.rope import Rope
from regard.spec import SpecError
from regard.text.train import byte
from regard.training.optimizer import AdamW
from regard.training.step import take_step

START, END = 1, 2


@pytest.mark.ledger("tr.translation")
def test_the_target_is_shifted_right_and_padding_has_no_weight() -> None:
    batch = translation_batch([[5, 6, 7], [8]], [[9], [10, 11]], START, END)
    assert batch.source.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch.source_valid.tolist() == [[True, True, True], [True, False, False]]
    assert batch.tokens.tolist() == [[START, 9, 0], [START, 10, 11]]
    assert batch.targets.tolist() == [[9, END, 0], [10, 11, END]]
    assert batch.weights.tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch.segments.tolist() == [[0, 0, -1], [0, 0, 0]]


@pytest.mark.ledger("tr.translation")
def test_examples_are_shifted_after_the_start_token_and_padded() -> None:
    tokenizer = byte()
    Translation().prepare_tokenizer(tokenizer)
    pairs = [{"source": "ab", "target": "xyz"}, {"source": "c", "target": ""}]
    columns = [Translation().tokenize(pair, tokenizer) for pair in pairs]
    rows = [Translation().sample(column, tokenizer, 8, np.random.default_rng(0)) for column in columns]
    batch = Translation().collate(rows, tokenizer, 8)
    start, end = tokenizer.decoder_start, tokenizer.eos
    a, b, c, x, y, z = (tokenizer.encode(letter)[0] for letter in "abcxyz")
    assert start == tokenizer.pad
    assert batch.source.tolist() == [[a, b], [c, tokenizer.pad]]
    assert batch.source_valid.tolist() == [[True, True], [True, False]]
    assert batch.tokens.tolist() == [[start, x, y, z], [start, tokenizer.pad, tokenizer.pad, tokenizer.pad]]
    assert [row[:n] for row, n in zip(batch.targets.tolist(), (4, 1), strict=True)] == [[x, y, z, end], [end]]
    assert batch.weights.tolist() == [[1, 1, 1, 1], [1, 0, 0, 0]]


def test_label_smoothing_equals_its_formula() -> None:
    """(1 - ε) onehot + ε / V as the target, for the valid tokens only."""
    model = transformer_2017(13, 16, 2, 32, 2, dropout=0.0).build(0).double()
    batch = translation_batch([[5, 6, 7], [8]], [[9], [10, 11]], START, END)
    loss, count, _ = Translation(label_smoothing=0.1)(model, batch)
    expected = 0.0
    for source, target in (([5, 6, 7], [9, END]), ([8], [10, 11, END])):
        log_p = model(torch.tensor([source]), torch.tensor([[START, *target[:-1]]]))[0].log_softmax(-1)
        for t, token in enumerate(target):
            smoothed = torch.full((13,), 0.1 / 13, dtype=torch.float64)
            smoothed[token] += 0.9
            expected -= smoothed @ log_p[t]
    assert count == 5 and abs(loss - expected) < 1e-10
    assert Translation().label_smoothing == 0.1
    with pytest.raises(SpecError, match="label_smoothing=1.0 must be"):
        Translation(label_smoothing=1.0)


def test_examples_without_tokens_or_with_too_many_are_refused() -> None:
    tokenizer, rng = byte(), np.random.default_rng(0)
    with pytest.raises(ValueError, match="the source of this example has no tokens: {'source': '', 'target': 'a'}"):
        Translation().tokenize({"source": "", "target": "a"}, tokenizer)
    columns = Translation().tokenize({"source": "abc", "target": "a long target"}, tokenizer)
    with pytest.raises(ValueError, match="has 14 tokens, more than data.length=8.*'a long target'"):
        Translation().sample(columns, tokenizer, 8, rng)
    assert Translation(too_long="drop").sample(columns, tokenizer, 8, rng) == []
    (cut,) = Translation(too_long="cut").sample(columns, tokenizer, 8, rng)
    assert len(cut["targets"]) == 8


@pytest.mark.ledger("tr.translation")
def test_a_trained_translator_generates_from_its_run(tmp_path: Path) -> None:
    """The start token of training is saved with every checkpoint, and generation starts with it."""
    pairs = [{"source": f"{a}{b}", "target": f"{b}{a}".upper()} for a in "abcd" for b in "abcd"]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    model = transformer_2017(400, 32, 2, 64, 1, dropout=0.0).to_dict()
    recipe = {
        "model": model,
        "objective": {"kind": "translation", "label_smoothing": 0.0},
        "data": {"path": str(tmp_path / "pairs.jsonl"), "rows": 16, "length": 8, "held_out": 0},
        "tokenizer": {"by": "byte"},
        "train": {"steps": 150, "lr": 5e-3, "schedule": {"kind": "constant", "warmup": 10}},
    }
    regard.train(recipe, out=tmp_path / "run", device="cpu")
    translator = regard.load(tmp_path / "run", device="cpu")
    start = translator.tokenizer.pad
    assert translator.generation.decoder_start_token_id == translator.tokenizer.decoder_start == start
    outputs = translator.generate([pair["source"] for pair in pairs], temperature=0, max_new=5)
    assert sum(output == pair["target"] for output, pair in zip(outputs, pairs, strict=True)) >= 14
    regard.save(translator, tmp_path / "saved")
    again = regard.load(tmp_path / "saved", device="cpu")
    assert again.generate("ab", temperature=0, max_new=5) == outputs[1]


@pytest.mark.ledger("tr.translation", "tr.parallel")
def test_one_forward_equals_steps_with_the_true_prefix() -> None:
    model = transformer_2017(13, 16, 2, 32, 2, dropout=0.0).build(0).double()
    sources, targets = [[5, 6, 7], [8]], [[9], [10, 11]]
    batch = translation_batch(sources, targets, START, END)
    loss, count, _ = translation(model, batch)
    expected = 0.0
    for source, target in zip(sources, targets, strict=True):
        for t, token in enumerate([*target, END]):
            prefix = torch.tensor([[START, *target[:t]]])
            expected -= model(torch.tensor([source]), prefix)[0, -1].log_softmax(-1)[token]
    assert count == 5
    assert abs(loss - expected) < 1e-10


@pytest.mark.ledger("model.encdec")
def test_a_transformer_learns_to_translate_and_reverse() -> None:
    """The target is the reversed source with other ids; accuracy is measured by greedy decoding."""
    model, generator = transformer_2017(15, 32, 4, 64, 2, dropout=0.0).build(0), torch.Generator().manual_seed(0)
    optimizer = AdamW().build(model, lr=5e-3)

    def random_pairs(rows: int) -> tuple[list[list[int]], list[list[int]]]:
        lengths = torch.randint(3, 5, (rows,), generator=generator).tolist()
        sources = [torch.randint(3, 9, (n,), generator=generator).tolist() for n in lengths]
        return sources, [[6 + token for token in reversed(source)] for source in sources]

    steps = [
        take_step(model, translation, translation_batch(*random_pairs(32), START, END), optimizer, clip=1.0)
        for _ in range(250)
    ]
    assert steps[0]["loss"] > 2
    assert sum(step["accuracy"] for step in steps[-5:]) / 5 > 0.95
    model.eval()
    correct = 0
    for source, target in zip(*random_pairs(20), strict=True):
        generated = [START]
        while generated[-1] != END and len(generated) < 8:
            generated.append(int(model(torch.tensor([source]), torch.tensor([generated]))[0, -1].argmax()))
        correct += generated[1:-1] == target
    assert correct >= 17


VISION = Encoder(
    Patches((2, 2), (4, 4), channels=1, cls=False),
    16,
    (Repeat((Block((Sublayer(Attention(2, mask=Full())), Sublayer(SwiGLU(24)))),)),),
    Learned(4),
)
LANGUAGE = Decoder(12, 16, (Repeat((Block((Sublayer(Attention(2, position=Rope())), Sublayer(SwiGLU(24)))),)),))


def images_with_a_bright_patch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """16 images of four patches, and the index of the bright one."""
    bright_index = torch.randint(4, (16,), generator=generator)
    images = 0.1 * torch.randn(16, 1, 4, 4, generator=generator)
    for row, patch in enumerate(bright_index.tolist()):
        images[row, 0, 2 * (patch // 2) :, 2 * (patch % 2) :][:2, :2] += 1.0
    return images, bright_index


@pytest.mark.ledger("cross.modal")
def test_cross_attention_learns_to_find_the_bright_patch() -> None:
    """The prompt is one token; the target is the index of the bright patch."""
    block = Block((Sublayer(Attention(2, position=Rope())), Sublayer(CrossAttention(2)), Sublayer(SwiGLU(24))))
    spec = EncoderDecoder(VISION, Decoder(12, 16, (Repeat((block,)),)))
    model, generator = spec.build(0), torch.Generator().manual_seed(0)
    optimizer, steps = AdamW().build(model, lr=1e-2), []
    for _ in range(60):
        images, bright_index = images_with_a_bright_patch(generator)
        prompts = translation_batch([[0]] * 16, [[] for _ in bright_index], start=3, end=0)
        batch = Batch(
            **{name: t for name, t in prompts.items() if name not in ("source", "source_valid", "targets")},
            source=images,
            targets=4 + bright_index.unsqueeze(1),
        )
        steps.append(take_step(model, translation, batch, optimizer, clip=1.0))
    assert steps[0]["loss"] > 2
    assert sum(step["accuracy"] for step in steps[-5:]) / 5 > 0.95


@pytest.mark.ledger("mm.interleave")
def test_interleaved_images_learn_to_name_the_bright_patch() -> None:
    """The image comes before the prompt, and its tokens have no weight in the loss."""
    spec = Interleaved(VISION, LANGUAGE, marker=1)
    model, generator = spec.build(0), torch.Generator().manual_seed(0)
    optimizer, steps = AdamW().build(model, lr=1e-2), []
    for _ in range(60):
        images, bright_index = images_with_a_bright_patch(generator)
        tokens = torch.tensor(spec.expand([1, 3])).expand(16, -1)
        targets = torch.cat([torch.zeros(16, 4, dtype=torch.int64), 4 + bright_index.unsqueeze(1)], 1)
        weights = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0]).expand(16, -1)
        layout = TokenLayout.whole(16, 5)
        batch = Batch(
            images=images.unsqueeze(1), tokens=tokens, targets=targets, weights=weights, positions=layout.positions,
            segments=torch.zeros_like(tokens),
        )  # fmt: skip
        steps.append(take_step(model, image_text, batch, optimizer, clip=1.0, micro_batches=2))
    assert steps[0]["loss"] > 2
    assert sum(step["accuracy"] for step in steps[-5:]) / 5 > 0.95
