"""Files whose tensors the compressed-tensors library packs: the weights that it unpacks."""

from pathlib import Path

import pytest
import torch

from regard.checkpoint import load
from regard.formats.integers import Integer
from tests.checkpoint.foreign_quantized.packers import Packed, write_pair
from tests.checkpoint.foreign_quantized.test_reading import LLAMA, ct, linears

pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")


@pytest.mark.parametrize("layout", ["pack-quantized", "int-quantized"])
@pytest.mark.parametrize(
    ("bits", "symmetric", "group"), [(4, True, 32), (4, False, 16), (8, True, None), (3, False, 32)]
)
def test_packed_weights_are_read(layout: str, bits: int, symmetric: bool, group: int | None, tmp_path: Path) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    settings = ct(bits, group, symmetric, layout)
    scheme = QuantizationScheme.model_validate(settings["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry(layout)

    def pack(shape: tuple[int, int], rng: torch.Generator) -> Packed:
        groups = 1 if group is None else shape[1] // group
        limit = 1 << bits - 1
        zero = torch.randint(-limit, limit, (shape[0], groups), generator=rng).to(torch.int8)
        state = {
            "weight": torch.randn(shape, generator=rng) / 8,
            "weight_scale": (torch.rand(shape[0], groups, generator=rng) + 0.5) / limit / 4,
            "weight_zero_point": torch.zeros_like(zero) if symmetric else zero,
        }
        packed = compressor.compress(state, scheme)
        return packed, compressor.decompress(packed, scheme)["weight"].double()

    folder, plain = write_pair(tmp_path, LLAMA | {"num_hidden_layers": 1}, pack, settings)
    ours = load(folder)
    assert {layer.format for layer in linears(ours).values()} == {Integer(bits, symmetric, group or "channel")}  # ty: ignore
    expected = load(plain)
    for (name, layer), other in zip(linears(ours).items(), linears(expected).values(), strict=True):
        torch.testing.assert_close(layer.weight, other.weight, rtol=1e-6, atol=0, msg=name)
