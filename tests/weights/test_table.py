"""Links in both directions: steps and their inverses, names, and a typed error for whatever does not fit."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from regard.weights.ops import ConvTaps, Shape, Split, StackTensors, Transpose
from regard.weights.table import IDENTITY, Link, StoredTensor, Table, WeightsError, placeholders

TABLE = Table(
    Link("base.embed.weight", "embedding.weight"),
    Link("base.h.{i}.attn.{leaf}", ("blocks.{i}.q.{leaf}", "blocks.{i}.k.{leaf}"), Transpose(), Split()),
    Link("base.h.{i}.gate_up.weight", ("blocks.{i}.gate.weight", "blocks.{i}.up.weight"), Split(dim=1)),
    Link("base.h.{i}.experts.{each}.{leaf}", "blocks.{i}.experts.{leaf}", StackTensors()),
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


def found(tensors: dict[str, Tensor]) -> dict[str, StoredTensor]:
    return {n: StoredTensor("file", tuple(t.shape), "F32", lambda t=t: t) for n, t in tensors.items()}


def read(tensors: dict[str, StoredTensor]) -> dict[str, Tensor]:
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
    theirs["h.0.mask"] = StoredTensor("file", (1, 1), "BOOL", lambda: torch.ones(1, 1))
    assert read(theirs).keys() == ours().keys()


def test_other_endings_are_read_and_not_written() -> None:
    table = Table(Link("norm.{leaf}", "norm.{leaf}"), endings={"gamma": "weight"})
    ones = {"norm.weight": torch.ones(2)}
    assert torch.equal(dict(table.read(found({"norm.gamma": torch.ones(2)}), ones))["norm.weight"], torch.ones(2))
    assert dict(table.write(ones)).keys() == ones.keys()


def test_other_beginnings_are_read_and_not_written() -> None:
    table = Table(Link("tower.{leaf}", "{leaf}"), beginnings={"tower.model.": "tower."})
    ones = {"weight": torch.ones(2)}
    for name in ("tower.weight", "tower.model.weight"):
        assert torch.equal(dict(table.read(found({name: torch.ones(2)}), ones))["weight"], torch.ones(2))
    assert dict(table.write(ones)).keys() == {"tower.weight"}


def test_two_spellings_of_one_name_are_refused() -> None:
    table = Table(Link("norm.{leaf}", "norm.{leaf}"), endings={"gamma": "weight"})
    both = found({"norm.gamma": torch.ones(2), "norm.weight": torch.zeros(2)})
    with pytest.raises(WeightsError, match=r"file: norm\.gamma and norm\.weight are two spellings of one name"):
        dict(table.read(both, {"norm.weight": torch.ones(2)}))


def test_a_link_of_a_model_inside_another() -> None:
    inner = Link("attn.{leaf}", ("q.{leaf}", "k.{leaf}"), Split()).inside("text.", "decoder.")
    written = dict(Table(inner).write({"decoder.q.bias": torch.zeros(2), "decoder.k.bias": torch.ones(1)}))
    assert torch.equal(written["text.attn.bias"], torch.tensor([0.0, 0.0, 1.0]))


@pytest.mark.parametrize(
    ("ours", "sides", "theirs"),
    [
        ((6, 12), (-1, 3, 2, 2), (6, 3, 2, 2)),  # a kernel
        ((1, 5), (1, 1, -1), (1, 1, 5)),
        ((4, 5), (1, -1, 5), (1, 4, 5)),
        ((1, 5), (-1,), (5,)),
        ((), (1,), (1,)),
    ],
    ids=str,
)
def test_the_same_numbers_in_another_shape(ours: tuple, sides: tuple, theirs: tuple) -> None:
    link, tensor = Link("theirs", "ours", Shape(sides)), torch.randn(ours)
    (written,) = link.write([tensor])
    assert written.shape == theirs
    assert torch.equal(link.read([written], link.shapes([tensor.to("meta")]))[0], tensor)
    assert torch.equal(written.flatten(), tensor.flatten())


def test_taps_of_a_convolution_turn_round() -> None:
    link, tensor = Link("conv1d.weight", "conv.weight", ConvTaps()), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    (written,) = link.write([tensor])  # three taps, the newest first, of two channels
    assert torch.equal(written, torch.tensor([[[5.0, 3.0, 1.0]], [[6.0, 4.0, 2.0]]]))
    assert torch.equal(link.read([written], link.shapes([tensor.to("meta")]))[0], tensor)


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
        r"base\.h\.11\.attn\.bias \(8,\) belongs to no part of this model": good
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


def knowing() -> Table:
    links = Link("embed", "embedding.weight"), Link("bias", "bias")
    return Table(*links, known={"bias": torch.zeros, "head": "embed", "waves": torch.ones})


KNOWN = {"embedding.weight": torch.randn(5, 3), "bias": torch.zeros(5)}


def test_what_is_known_may_be_missing_or_there() -> None:
    embed = {"embed": KNOWN["embedding.weight"]}
    for theirs in (embed, embed | {"head": embed["embed"].clone(), "waves": torch.ones(2, 7), "bias": torch.zeros(5)}):
        back = dict(knowing().read(found(theirs), {name: tensor.to("meta") for name, tensor in KNOWN.items()}))
        assert all(torch.equal(back[name], tensor) for name, tensor in KNOWN.items())


@pytest.mark.parametrize(
    ("spare", "message"),
    [
        (
            {"head": torch.zeros(5, 3)},
            "file: head is a copy of embed by the config, but holds other numbers; .* tie_word_embeddings",
        ),
        ({"head": torch.zeros(4, 3)}, "head is a copy of embed"),
        ({"waves": torch.full((2,), torch.nan)}, "waves is the same in every such model, but holds other numbers"),
    ],
)
def test_what_is_known_and_other_numbers_are_refused(spare: dict[str, Tensor], message: str) -> None:
    theirs = found({"embed": KNOWN["embedding.weight"]} | spare)
    with pytest.raises(WeightsError, match=message):
        dict(knowing().read(theirs, {name: tensor.to("meta") for name, tensor in KNOWN.items()}))


def test_a_copy_of_what_is_missing_is_missing() -> None:
    table = Table(Link("embed", "embedding.weight"), known={"embed": "shared"})
    with pytest.raises(WeightsError, match="embed .* is missing"):
        dict(table.read({}, {"embedding.weight": torch.empty(5, 3, device="meta")}))


def test_matrices_of_experts_gate_and_up_taking_turns() -> None:
    """GPT-OSS: (X, in, 2 · out), a column of the gate, a column of up, a column of the gate …"""
    link = Link("gate_up", ("gate", "up"), Transpose(), Split(dim=1, groups=3))
    gate, up = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    (fused,) = link.write([gate, up])
    assert torch.equal(fused[:, :, ::2], gate.mT)
    assert torch.equal(fused[:, :, 1::2], up.mT)
    back = link.read([fused], link.shapes([gate.to("meta"), up.to("meta")]))
    assert torch.equal(back[0], gate) and torch.equal(back[1], up)


def test_keys_and_values_of_every_head_in_turn() -> None:
    """DeepSeek: each head's rows for keys, then its rows for values; ours has a matrix a head."""
    link = Link("kv_b", ("k_up", "v_up"), Split(groups=2), Shape((-1, 5)))
    k_up, v_up = torch.randn(2, 3, 5), torch.randn(2, 4, 5)
    (fused,) = link.write([k_up, v_up])
    assert torch.equal(fused, torch.cat([k_up[0], v_up[0], k_up[1], v_up[1]]))
    back = link.read([fused], link.shapes([k_up.to("meta"), v_up.to("meta")]))
    assert torch.equal(back[0], k_up) and torch.equal(back[1], v_up)


@pytest.mark.parametrize("kv_heads", [1, 3, 6])
def test_queries_keys_and_values_group_after_group(kv_heads: int) -> None:
    """Falcon: the queries of a group, its key, its value, then the next group's; biases alike."""
    heads, dim = 6, 2
    for columns in ((5,), ()):
        q, k, v = (torch.randn(n * dim, *columns) for n in (heads, kv_heads, kv_heads))
        rows = []
        for group in range(kv_heads):
            for part, each in ((q, heads // kv_heads), (k, 1), (v, 1)):
                rows.append(part[group * each * dim : (group + 1) * each * dim])
        op = Split(groups=kv_heads)
        (fused,) = op.write([q, k, v])
        assert torch.equal(fused, torch.cat(rows))
        assert all(map(torch.equal, op.read([fused], [q, k, v]), (q, k, v)))
