"""Two tables in a row: the same tensors, unread until they are asked for, and faults in the file's own words."""

import pytest
import torch
from torch import Tensor

from regard.weights.chain import Chain
from regard.weights.ops import InterleavePairs, Split, Transpose, joined
from regard.weights.table import Link, StoredTensor, Table, WeightsError

INNER = Table(
    Link("h.{i}.qkv.{leaf}", ("blocks.{i}.q.{leaf}", "blocks.{i}.k.{leaf}"), Split()),
    Link("wte.weight", "embedding.weight"),
)
OUTER = Table(Link("blk.{i}.attn_qkv.{leaf}", "h.{i}.qkv.{leaf}", Transpose()), Link("embd.weight", "wte.weight"))
CHAIN = Chain(OUTER, INNER)


def ours() -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(0)
    shapes = {"embedding.weight": (7, 4), "blocks.3.q.weight": (6, 4), "blocks.3.k.weight": (2, 4)}
    return {name: torch.randn(shape, generator=draws) for name, shape in shapes.items()}


def found(tensors: dict[str, Tensor], read: list[str]) -> dict[str, StoredTensor]:
    def reader(name: str, tensor: Tensor) -> Tensor:
        read.append(name)
        return tensor

    return {n: StoredTensor("file", tuple(t.shape), "F32", lambda n=n, t=t: reader(n, t)) for n, t in tensors.items()}


def meta() -> dict[str, Tensor]:
    return {name: tensor.to("meta") for name, tensor in ours().items()}


def test_there_and_back_one_at_a_time() -> None:
    theirs, read = dict(CHAIN.write(ours())), []
    assert {name: tuple(t.shape) for name, t in theirs.items()} == {
        "embd.weight": (7, 4),
        "blk.3.attn_qkv.weight": (4, 8),
    }
    for name, tensor in CHAIN.read(found(theirs, read), meta()):
        assert torch.equal(tensor, ours()[name])
        assert len(read) == (1 if name == "embedding.weight" else 2)
    assert read == ["embd.weight", "blk.3.attn_qkv.weight"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blk.3.attn_qkv.weight": None}, r"blk\.3\.attn_qkv\.weight \(4, 8\) is missing"),
        ({"blk.3.attn_qkv.weight": torch.ones(8, 4)}, r"blk\.3\.attn_qkv\.weight should be \(4, 8\).* found \(8, 4\)"),
        ({"extra": torch.ones(1)}, r"extra \(1,\) belongs to no part"),
    ],
)
def test_faults_are_named_as_the_file_names_them(change: dict[str, Tensor | None], message: str) -> None:
    read: list[str] = []
    theirs = {n: t for n, t in (dict(CHAIN.write(ours())) | change).items() if t is not None}
    with pytest.raises(WeightsError, match=message):
        dict(CHAIN.read(found(theirs, read), meta()))
    assert not read


@pytest.mark.parametrize("shape", [(12, 5), (12,)])
def test_interleaved_rows_are_pairs_of_halves(shape: tuple[int, ...]) -> None:
    ours, step = torch.arange(12).reshape(12, *[1] * (len(shape) - 1)).expand(shape), InterleavePairs(heads=2)
    (theirs,) = step.write([ours])
    assert theirs.reshape(12, -1)[:, 0].tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert torch.equal(step.read([theirs], [])[0], ours)


@pytest.mark.parametrize("dim", [0, 1])
def test_shapes_are_joined_like_tensors(dim: int) -> None:
    parts = [torch.ones(2, 3, 4), torch.ones(2, 3, 4)]
    assert joined([part.to("meta") for part in parts], dim).shape == torch.cat(parts, dim).shape
