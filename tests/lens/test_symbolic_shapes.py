"""Sizes are named by what they depend on, not by their value."""

import pytest

from regard.lens.symbolic_shapes import LENGTH, symbol, symbolic_shapes
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.experts import Experts
from regard.parts.feedforward import SwiGLU
from tests.laws import OTHERS, build


def test_rows_of_experts_and_sizes_that_equal_the_length() -> None:
    """A width of 8 is a number, also where the length of the trial is 8."""
    blocks = (Block((Sublayer(Attention(2)), Sublayer(Experts(4, 2, SwiGLU(12))))),)
    found = symbolic_shapes(Decoder(31, LENGTH, (Repeat(blocks),)).build(seed=0))
    body = "stack.blocks.0.sublayers"
    assert found["stack.input"] == ["B", "L", LENGTH]
    assert found[f"{body}.0.body.pattern"] == ["B", 2, "L", "L"]
    assert found[f"{body}.1.body.experts.neurons"] == ["2·B·L", 12]


def test_both_sides_of_an_encoder_decoder_are_named() -> None:
    found = symbolic_shapes(build(OTHERS["encoder-decoder"]))
    assert found["source.stack.input"][:2] == found["target.stack.input"][:2] == ["B", "L"]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [((2, 2, 2), 2), ((2, 3, 2), "B"), ((8, 8, 12), "L"), ((16, 24, 24), "B·L"), ((4, 6, 4), "2·B"), ((5, 5, 7), "…")],
)
def test_a_size_is_a_number_or_a_multiple(sizes: tuple[int, int, int], expected: str | int) -> None:
    assert symbol(*sizes) == expected
