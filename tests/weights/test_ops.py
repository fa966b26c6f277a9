"""Each weight operation and its inverse, bit for bit, against the layout of the library that it converts."""

import pytest
import torch

from regard.weights.ops import ConvTaps, InterleavePairs, Reshape, Split, Transpose, concatenate
from regard.weights.table import Link


@pytest.mark.parametrize(
    ("ours", "shape", "theirs"),
    [
        ((6, 12), (-1, 3, 2, 2), (6, 3, 2, 2)),  # a convolution kernel
        ((1, 5), (1, 1, -1), (1, 1, 5)),
        ((4, 5), (1, -1, 5), (1, 4, 5)),
        ((1, 5), (-1,), (5,)),
        ((), (1,), (1,)),
    ],
    ids=str,
)
def test_reshape_keeps_values_and_their_order(ours: tuple, shape: tuple, theirs: tuple) -> None:
    link, tensor = Link("theirs", "ours", Reshape(shape)), torch.randn(ours)
    (written,) = link.write([tensor])
    assert written.shape == theirs
    assert torch.equal(link.read([written], link.stages([tensor.to("meta")]))[0], tensor)
    assert torch.equal(written.flatten(), tensor.flatten())


def test_conv_taps_are_reversed() -> None:
    link, tensor = Link("conv1d.weight", "conv.weight", ConvTaps()), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    (written,) = link.write([tensor])  # three taps of two channels; our first tap is the newest
    assert torch.equal(written, torch.tensor([[[5.0, 3.0, 1.0]], [[6.0, 4.0, 2.0]]]))
    assert torch.equal(link.read([written], link.stages([tensor.to("meta")]))[0], tensor)


@pytest.mark.parametrize("shape", [(12, 5), (12,)])
def test_interleaved_rows_are_pairs_of_the_two_halves(shape: tuple[int, ...]) -> None:
    ours, op = torch.arange(12).reshape(12, *[1] * (len(shape) - 1)).expand(shape), InterleavePairs(heads=2)
    (theirs,) = op.write([ours])
    assert theirs.reshape(12, -1)[:, 0].tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert torch.equal(op.read([theirs], [])[0], ours)


@pytest.mark.parametrize("dim", [0, 1])
def test_meta_tensors_are_concatenated_like_tensors(dim: int) -> None:
    tensors = [torch.ones(2, 3, 4), torch.ones(2, 3, 4)]
    assert concatenate([tensor.to("meta") for tensor in tensors], dim).shape == torch.cat(tensors, dim).shape


def test_interleaved_gate_and_up_columns_are_split() -> None:
    """GPT-OSS: (X, in, 2 · out), with alternating columns of gate and up."""
    link = Link("gate_up", ("gate", "up"), Transpose(), Split(dim=1, groups=3))
    gate, up = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    (fused,) = link.write([gate, up])
    assert torch.equal(fused[:, :, ::2], gate.mT)
    assert torch.equal(fused[:, :, 1::2], up.mT)
    read_back = link.read([fused], link.stages([gate.to("meta"), up.to("meta")]))
    assert torch.equal(read_back[0], gate) and torch.equal(read_back[1], up)


def test_keys_and_values_are_split_per_head() -> None:
    """DeepSeek: per head the rows of its keys, then of its values; ours are one matrix per head."""
    link = Link("kv_b", ("k_up", "v_up"), Split(groups=2), Reshape((-1, 5)))
    k_up, v_up = torch.randn(2, 3, 5), torch.randn(2, 4, 5)
    (fused,) = link.write([k_up, v_up])
    assert torch.equal(fused, torch.cat([k_up[0], v_up[0], k_up[1], v_up[1]]))
    read_back = link.read([fused], link.stages([k_up.to("meta"), v_up.to("meta")]))
    assert torch.equal(read_back[0], k_up) and torch.equal(read_back[1], v_up)


@pytest.mark.parametrize("kv_heads", [1, 3, 6])
def test_queries_keys_and_values_are_split_per_group(kv_heads: int) -> None:
    """Falcon: the queries of a group, its key, its value, then those of the next group, in weights and biases."""
    heads, dim = 6, 2
    for columns in ((5,), ()):
        q, k, v = (torch.randn(n * dim, *columns) for n in (heads, kv_heads, kv_heads))
        rows = []
        for group in range(kv_heads):
            for tensor, per_group in ((q, heads // kv_heads), (k, 1), (v, 1)):
                rows.append(tensor[group * per_group * dim : (group + 1) * per_group * dim])
        op = Split(groups=kv_heads)
        (fused,) = op.write([q, k, v])
        assert torch.equal(fused, torch.cat(rows))
        assert all(map(torch.equal, op.read([fused], [q, k, v]), (q, k, v)))
