"""Links in both directions: steps and their inverses, names, and a typed error for whatever does not fit."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from regard.weights.ops import Split, Stack, Transpose
from regard.weights.table import IDENTITY, Found, Link, Table, WeightsError, placeholders

TABLE = Table(
    Link("base.embed.weight", "embedding.weight"),
    Link("base.h.{i}.attn.{leaf}", ("blocks.{i}.q.{leaf}", "blocks.{i}.k.{leaf}"), Transpose(), Split()),
    Link("base.h.{i}.gate_up.weight", ("blocks.{i}.gate.weight", "blocks.{i}.up.weight"), Split(dim=1)),
    Link("base.h.{i}.experts.{each}.{leaf}", "blocks.{i}.experts.{leaf}", Stack()),
    prefix="base.",
    ignored=("base.h.{i}.mask",),
)


def ours() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"embedding.weight": (7, 4)}
    for i in (0, 1, 10):
        shapes |= {f"blocks.{i}.q.weight": (6, 4), f"blocks.{i}.k.weight": (2, 4), f"blocks.{i}.q.bias": (6,)}
        shapes |= {f"blocks.{i}.k.bias": (2,), f"blocks.{i}.gate.weight": (3, 4), f"blocks.{i}.up.weight": (3, 5)}
        shapes |= {f"blocks.{i}.experts.weight": (2, 3, 4)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def found(tensors: dict[str, Tensor]) -> dict[str, Found]:
    return {n: Found("file", tuple(t.shape), "F32", lambda t=t: t) for n, t in tensors.items()}


def read(tensors: dict[str, Found]) -> dict[str, Tensor]:
    return dict(TABLE.read(tensors, {name: tensor.to("meta") for name, tensor in ours().items()}))


def test_there_and_back_bit_for_bit() -> None:
    theirs = dict(TABLE.write(ours()))
    assert {name: tuple(t.shape) for name, t in theirs.items() if "10" in name} == {
        "base.h.10.attn.weight": (4, 8),
        "base.h.10.attn.bias": (8,),
        "base.h.10.gate_up.weight": (3, 9),
        "base.h.10.experts.0.weight": (3, 4),
        "base.h.10.experts.1.weight": (3, 4),
    }
    back = read(found(theirs))
    assert back.keys() == ours().keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in ours().items())


def test_a_prefix_may_be_missing_and_what_is_ignored_may_be_there() -> None:
    theirs = found({name.removeprefix("base."): t for name, t in TABLE.write(ours())})
    theirs["h.0.mask"] = Found("file", (1, 1), "BOOL", lambda: torch.ones(1, 1))
    assert read(theirs).keys() == ours().keys()


def test_every_fault_is_found_before_anything_is_read() -> None:
    def never() -> Tensor:
        raise AssertionError("read before all was checked")

    good = {name: replace(f, read=never) for name, f in found(dict(TABLE.write(ours()))).items()}
    key = "base.h.10.gate_up.weight"
    faults = {
        r"file: base\.h\.10\.gate_up\.weight \(3, 9\) is missing": {n: f for n, f in good.items() if n != key},
        r"gate_up\.weight should be \(3, 9\) by the config, found \(9, 3\)": good
        | {key: replace(good[key], shape=(9, 3))},
        "stored as I8; read are F64, F32, F16, BF16": good | {key: replace(good[key], dtype="I8")},
        r"base\.h\.11\.attn\.bias \(8,\) belongs to no part; did you mean": good
        | {"base.h.11.attn.bias": good["base.h.0.attn.bias"]},
    }
    for message, tensors in faults.items():
        with pytest.raises(WeightsError, match=message):
            read(tensors)


def test_a_weight_of_ours_without_a_link_is_named() -> None:
    with pytest.raises(WeightsError, match=r"blocks\.0\.sink has no place in this weight table"):
        dict(TABLE.write(ours() | {"blocks.0.sink": torch.zeros(1)}))


def test_identity_keeps_every_name() -> None:
    assert dict(IDENTITY.write(ours())).keys() == ours().keys()


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("h.{i}.{leaf}", "h.12.bias", {"i": "12", "leaf": "bias"}),
        ("h.{i}.{leaf}", "h.12.attn.bias", None),
        ("h.{i}.w", "hx1.w", None),
        ("{path}", "a.b.c", {"path": "a.b.c"}),
        ("plain", "plain", {}),
    ],
)
def test_placeholders(pattern: str, name: str, expected: dict | None) -> None:
    assert placeholders(pattern, name) == expected
