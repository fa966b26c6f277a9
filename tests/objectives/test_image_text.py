"""Images before texts: markers, weights, and what is refused."""

import numpy as np
import pytest

from regard.kernels.attention.mask import Full
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.interleaved import Interleaved
from regard.models.stack import Repeat
from regard.objectives.image_text import ImageText
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.patches import Patches
from regard.spec import SpecError
from regard.text.train import byte

OBJECTIVE = ImageText(patches=4)
TOKENIZER = byte(OBJECTIVE.special_tokens)
MARKER = TOKENIZER.core.token_to_id("<image>")
IMAGE = np.zeros((3, 8, 8))


def layers(attention: Attention) -> tuple[Repeat, ...]:
    return (Repeat((Block((Sublayer(attention),)),)),)


MODEL = Interleaved(
    Encoder(Patches((4, 4), (8, 8)), 8, layers(Attention(2, mask=Full()))),
    Decoder(TOKENIZER.vocab_size, 8, layers(Attention(2))),
    marker=MARKER,
)


def test_an_image_is_followed_by_its_text_and_markers_are_no_targets() -> None:
    columns = OBJECTIVE.tokenize({"image": IMAGE, "text": "cat"}, TOKENIZER)
    assert columns["ids"].tolist() == [MARKER] * 4 + [*TOKENIZER.encode("cat"), TOKENIZER.eos]
    rng = np.random.default_rng(0)
    items = OBJECTIVE.sample(columns, TOKENIZER, 16, rng)
    assert items[0]["weights"].tolist() == [0, 0, 0, 1, 1, 1, 1]  # "c" is predicted after the last marker
    batch = OBJECTIVE.collate([items, items], TOKENIZER, 16)
    assert batch.images.shape == (2, 1, 3, 8, 8) and batch.tokens.shape == (2, 7)
    loss, count, _ = OBJECTIVE(MODEL.build(0), batch)
    assert count == 8 and loss > 0


def test_only_the_completion_of_a_prompt_counts() -> None:
    columns = OBJECTIVE.tokenize({"image": IMAGE, "prompt": "What? ", "completion": "cat"}, TOKENIZER)
    assert columns["weights"].tolist() == [0] * (4 + len("What? ")) + [1] * len("cat.")


@pytest.mark.parametrize("length", [2, 3])
def test_an_image_longer_than_a_row_is_refused(length: int) -> None:
    columns = OBJECTIVE.tokenize({"image": IMAGE, "text": "cat"}, TOKENIZER)
    with pytest.raises(ValueError, match=f"data.length={length} is too short for an image of 4 tokens"):
        OBJECTIVE.sample(columns, TOKENIZER, length, np.random.default_rng(0))


def test_a_tokenizer_without_the_marker_and_another_number_of_patches_are_refused() -> None:
    with pytest.raises(SpecError, match="no image token <image>; set objective.token"):
        OBJECTIVE.prepare_tokenizer(byte())
    with pytest.raises(SpecError, match="has patches=9, and the model 4 per image"):
        ImageText(patches=9).check_model(MODEL)
