"""Number formats: bounds of the error, sizes, and plain loops as references."""

import math

import pytest
import torch
from torch import Tensor

from regard.formats.base import NumberFormat, pack_bits, unpack_bits
from regard.formats.floats import Float
from regard.formats.integers import Integer
from regard.formats.nf4 import NF4, dynamic_levels, normal_levels
from regard.spec import SpecError

INTEGERS = [
    Integer(bits, symmetric, group, scale_dtype)
    for bits in (2, 3, 4, 5, 6, 8)
    for symmetric in (True, False)
    for group, scale_dtype in (("tensor", "float32"), ("channel", "float32"), (32, "float16"), (16, "bfloat16"))
]
FLOATS = [
    Float("float16"), Float("bfloat16"), Float("float8_e4m3fn"), Float("float8_e5m2"), Float("float8_e4m3fn", 16),
]  # fmt: skip
FORMATS: list[NumberFormat] = [*INTEGERS, *FLOATS, NF4(), NF4(32), NF4(double=False)]
SHAPES = [(24, 64), (1, 128), (3, 8, 192)]


def draw(shape: tuple[int, ...], kind: str = "normal") -> Tensor:
    rng = torch.Generator().manual_seed(math.prod(shape))
    weight = torch.randn(shape, generator=rng) * 0.02
    if kind == "outlier":
        weight.view(-1)[5] = 3.0
    if kind == "positive":
        weight = weight.abs()
    if kind == "zero":
        weight = torch.zeros(shape)
    return weight


@pytest.mark.ledger("q.map")
@pytest.mark.parametrize("kind", ["normal", "outlier", "positive", "zero"])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_errors_are_within_the_bound_and_sizes_are_as_planned(format: NumberFormat, kind: str) -> None:
    for shape in SHAPES:
        weight = draw(shape, kind)
        stored = format.quantize(weight)
        restored, bound = format.dequantize(stored), format.error_bound(stored)
        assert restored.shape == weight.shape and bound.broadcast_to(weight.shape).shape == weight.shape
        assert ((restored - weight).abs() <= bound * (1 + 1e-5)).all()
        assert sum(tensor.nbytes for tensor in stored.values()) == format.bytes(shape)
        like = format.stored_like(shape)
        found = {name: (tensor.shape, tensor.dtype) for name, tensor in stored.items()}
        assert found == {name: (tensor.shape, tensor.dtype) for name, tensor in like.items()}
        assert kind != "zero" or (restored == 0).all()


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_numbers_are_rounded_to_given_scales(format: NumberFormat) -> None:
    """Other weights with the stored scales: the nearest codes, and for each column alone the same numbers."""
    weight, other = draw((24, 64)), draw((24, 64), "outlier") * 0.7
    stored = format.quantize(weight)
    kept = format.requantize(other, stored)
    assert all(torch.equal(kept[name], stored[name]) for name in stored if name != "codes")
    if not getattr(format, "double", False):  # whose codes are chosen before the scales are rounded, as in QLoRA
        assert torch.equal(format.requantize(weight, stored)["codes"].float(), stored["codes"].float())
    grid, restored = format.grid(stored), format.dequantize(kept)
    for column in range(64):
        scales = {name: tensor[:, column] for name, tensor in grid.items()}
        torch.testing.assert_close(format.nearest(other[:, column], scales), restored[:, column], rtol=0, atol=0)


SYMMETRIC = [format for format in INTEGERS if format.symmetric and format.scale_dtype == "float32"]


@pytest.mark.ledger("q.map")
@pytest.mark.parametrize("format", [*SYMMETRIC, *FLOATS, NF4(double=False)], ids=str)
def test_a_dequantized_weight_is_stored_without_a_further_error(format: NumberFormat) -> None:
    restored = format.dequantize(format.quantize(draw((24, 64))))
    torch.testing.assert_close(format.dequantize(format.quantize(restored)), restored, rtol=1e-6, atol=0)


@pytest.mark.ledger("q.int4")
@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_are_packed_without_gaps(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (3, 5, 40), dtype=torch.uint8)
    packed = pack_bits(codes, bits)
    assert packed.shape == (3, 5, 5 * bits) and torch.equal(unpack_bits(packed, bits), codes)
    number = sum(code << (bits * place) for place, code in enumerate(codes[0, 0].tolist()))
    assert number.to_bytes(5 * bits, "little") == bytes(packed[0, 0].tolist())


@pytest.mark.ledger("q.int4")
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_integers_equal_a_plain_loop(bits: int, symmetric: bool) -> None:
    format, weight = Integer(bits, symmetric, 16), draw((4, 32), "outlier").double()
    restored = format.dequantize(format.quantize(weight), torch.float64)
    for row in range(4):
        for start in (0, 16):
            group = weight[row, start : start + 16].tolist()
            if symmetric:
                scale, zero = max(map(abs, group)) / (2 ** (bits - 1) - 1), 2 ** (bits - 1)
            else:
                low, high = min(0.0, *group), max(0.0, *group)
                scale = (high - low) / (2**bits - 1)
                zero = round(-low / scale)
            scale = torch.tensor(scale).item()  # as it is stored, in float32
            expected = [scale * (min(max(round(value / scale) + zero, 0), 2**bits - 1) - zero) for value in group]
            assert restored[row, start : start + 16].tolist() == pytest.approx(expected, rel=1e-12)


def test_a_group_of_all_inputs_is_a_channel_and_finer_groups_have_smaller_errors() -> None:
    weight = draw((24, 64), "outlier")
    whole, channel = Integer(4, group=64), Integer(4)
    assert torch.equal(whole.dequantize(whole.quantize(weight)), channel.dequantize(channel.quantize(weight)))
    errors = [
        (format.dequantize(format.quantize(weight)) - weight).square().mean().item()
        for format in (Integer(4, group="tensor"), channel, Integer(4, group=32), Integer(4, group=16))
    ]
    assert errors == sorted(errors, reverse=True) and errors[-1] < errors[0] / 10


@pytest.mark.ledger("q.fp8")
@pytest.mark.parametrize(("name", "exponent", "fraction"), [("float8_e4m3fn", 4, 3), ("float8_e5m2", 5, 2)])
def test_numbers_of_eight_bits_are_those_of_the_definition(name: str, exponent: int, fraction: int) -> None:
    bias = 2 ** (exponent - 1) - 1
    values = torch.arange(256, dtype=torch.uint8).view(getattr(torch, name)).float()
    for code in range(256):
        sign, power, digits = code >> 7, code >> fraction & (1 << exponent) - 1, code & (1 << fraction) - 1
        if name == "float8_e4m3fn" and code & 127 == 127 or name == "float8_e5m2" and power == 31:
            continue  # not a number, or infinite
        magnitude = (digits / 2**fraction + (power > 0)) * 2.0 ** (max(power, 1) - bias)
        assert values[code].item() == (-1) ** sign * magnitude


@pytest.mark.ledger("q.fp8")
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_eight_bits_are_half_the_bytes_of_sixteen(name: str) -> None:
    outputs, inputs = 64, 512
    scales = 4 * outputs  # float32, one per output
    assert 2 * (Float(name).bytes((outputs, inputs)) - scales) == Float("float16").bytes((outputs, inputs))


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_numbers_of_sixteen_bits_are_rounded_as_by_torch(name: str) -> None:
    weight = draw((24, 64), "outlier")
    format = Float(name)
    assert torch.equal(format.dequantize(format.quantize(weight)), weight.to(getattr(torch, name)).float())
    with pytest.raises(SpecError, match="larger than 65504"):
        Float("float16").quantize(torch.tensor([[1e5]]))


@pytest.mark.ledger("q.fig")
def test_the_nearest_number_to_a_weight_of_0_62_in_sixteen_bits() -> None:
    format, weight = Float("float16"), torch.tensor([[0.62]], dtype=torch.float64)
    stored = format.dequantize(format.quantize(weight), torch.float64)
    assert stored.item() == 0.6201171875 and round((stored - weight).item(), 5) == 0.00012
    sixteenths = torch.arange(17, dtype=torch.float64) / 16  # another grid
    nearest = sixteenths[(sixteenths - 0.62).abs().argmin()]
    assert nearest.item() == 0.625 and round(nearest.item() - 0.62, 5) == 0.005


@pytest.mark.ledger("q.nf4")
def test_levels_of_nf4_are_quantiles_of_a_normal_and_fit_it_better_than_integers() -> None:
    outermost = (1 - 1 / 32 + 1 - 1 / 30) / 2  # the quantile whose value becomes 1
    positive, negative = (
        torch.special.ndtri(torch.linspace(outermost, 0.5, count, dtype=torch.float64)) for count in (9, 8)
    )
    quantiles = torch.cat([-negative, positive.flip(0)[1:]]) / positive.max()
    assert normal_levels().tolist() == pytest.approx(quantiles.tolist(), abs=5e-7)
    levels = dynamic_levels()
    assert len(levels) == len(levels.unique()) == 256 and levels[-1] == 1 and (levels == 0).sum() == 1
    weight = draw((256, 512))
    errors = [
        (format.dequantize(format.quantize(weight)) - weight).square().mean()
        for format in (NF4(double=False), Integer(4, group=64))
    ]
    assert errors[0] < 0.95 * errors[1]
    assert NF4().bytes((4096, 4096)) * 8 / 4096**2 == pytest.approx(4.127, abs=5e-4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Integer(1), "bits=1 must be from 2 to 8"),
        (lambda: Integer(group=0), "group=0 must be positive"),
        (lambda: Integer(4, group=48).quantize(draw((24, 64))), "group=48 does not divide the 64 inputs"),
        (lambda: Integer(3).quantize(draw((8, 4))), "do not fill whole bytes"),
        (lambda: Integer().quantize(torch.tensor([[math.nan]])), "not finite"),
        (lambda: Float("float8_e5m2", 0), "group=0 must be positive"),
        (lambda: Float("bfloat16", 32), "bfloat16 has no scales; leave out group=32"),
        (lambda: Float("float8_e4m3fn", 48).quantize(draw((24, 64))), "group=48 does not divide the 64 inputs"),
        (lambda: NF4(3), "block=3 must be positive and even"),
        (lambda: NF4().quantize(draw((3, 10))), "no whole blocks of 64"),
    ],
)
def test_what_a_format_cannot_store_is_refused(make, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make()
