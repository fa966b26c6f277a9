"""Translation: shifted targets, weights, teacher forcing and training; and training on images with text."""

import pytest
import torch
from torch import Tensor

from regard.data.batch import Batch
from regard.kernels.attention.mask import Full
from regard.layout import TokenLayout
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.interleaved import Interleaved
from regard.models.presets import transformer_2017
from regard.models.stack import Repeat
from regard.objectives.next_token import image_text
from regard.objectives.translation import translation, translation_batch
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.cross_attention import CrossAttention
from regard.parts.feedforward import SwiGLU
from regard.parts.patches import Patches
from regard.parts.position.learned import Learned
from regard.parts.position.rope import Rope
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
