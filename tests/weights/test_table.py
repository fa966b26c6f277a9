"""Weight tables are read and written: names, aliases, derived tensors, chains, and a typed error per mismatch."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from regard.weights.ops import Split, StackTensors, Transpose
from regard.weights.table import IDENTITY, Chain, Link, StoredTensor, Table, WeightsError, match_placeholders

TABLE = Table(
    Link("base.embed.weight", "embedding.weight"),
    Link("base.h.{i}.attn.{leaf}", ("blocks.{i}.q.{leaf}", "blocks.{i}.k.{leaf}"), Transpose(), Split()),
    Link("base.h.{i}.gate_up.weight", ("blocks.{i}.gate.weight", "blocks.{i}.up.weight"), Split(dim=1)),
    Link("base.h.{i}.experts.{each}.{leaf}", "blocks.{i}.experts.{leaf}", StackTensors()),
    prefix="base.",
    ignored=("base.h.{i}.mask",),
)


def random_tensors(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def on_meta(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to("meta") for name, tensor in tensors.items()}


def our_tensors() -> dict[str, Tensor]:
    shapes = {"embedding.weight": (7, 4)}
    for i in (0, 1, 10):
        shapes |= {f"blocks.{i}.q.weight": (6, 4), f"blocks.{i}.k.weight": (2, 4), f"blocks.{i}.q.bias": (6,)}
        shapes |= {f"blocks.{i}.k.bias": (2,), f"blocks.{i}.gate.weight": (3, 4), f"blocks.{i}.up.weight": (3, 5)}
        shapes |= {f"blocks.{i}.experts.weight": (2, 3, 4)}
    return random_tensors(shapes)


def stored(tensors: dict[str, Tensor], log: list[str] | None = None) -> dict[str, StoredTensor]:
    """These tensors as if stored in a file; the name of each tensor that is read is appended to `log`."""

    def load(name: str) -> Tensor:
        if log is not None:
            log.append(name)
        return tensors[name]

    return {n: StoredTensor("file", tuple(t.shape), "F32", lambda n=n: load(n)) for n, t in tensors.items()}


def read_table(tensors: dict[str, StoredTensor]) -> dict[str, Tensor]:
    return dict(TABLE.read(tensors, on_meta(our_tensors())))


def test_tensors_are_written_and_read_back_bit_for_bit() -> None:
    theirs = dict(TABLE.write(our_tensors()))
    assert {name: tuple(t.shape) for name, t in theirs.items() if "10" in name} == {
        "base.h.10.attn.weight": (4, 8),
        "base.h.10.attn.bias": (8,),
        "base.h.10.gate_up.weight": (3, 9),
        "base.h.10.experts.0.weight": (3, 4),
        "base.h.10.experts.1.weight": (3, 4),
    }
    read_back = read_table(stored(theirs))
    assert read_back.keys() == our_tensors().keys()
    assert all(torch.equal(read_back[name], tensor) for name, tensor in our_tensors().items())


def test_the_prefix_may_be_missing_and_ignored_tensors_may_be_present() -> None:
    theirs = stored({name.removeprefix("base."): t for name, t in TABLE.write(our_tensors())})
    theirs["h.0.mask"] = StoredTensor("file", (1, 1), "BOOL", lambda: torch.ones(1, 1))
    assert read_table(theirs).keys() == our_tensors().keys()


def test_leaf_aliases_are_read_and_not_written() -> None:
    table = Table(Link("norm.{leaf}", "norm.{leaf}"), leaf_aliases={"gamma": "weight"})
    ones = {"norm.weight": torch.ones(2)}
    assert torch.equal(dict(table.read(stored({"norm.gamma": torch.ones(2)}), ones))["norm.weight"], torch.ones(2))
    assert dict(table.write(ones)).keys() == ones.keys()


def test_prefix_aliases_are_read_and_not_written() -> None:
    table = Table(Link("tower.{leaf}", "{leaf}"), prefix_aliases={"tower.model.": "tower."})
    ones = {"weight": torch.ones(2)}
    for name in ("tower.weight", "tower.model.weight"):
        assert torch.equal(dict(table.read(stored({name: torch.ones(2)}), ones))["weight"], torch.ones(2))
    assert dict(table.write(ones)).keys() == {"tower.weight"}


def test_two_spellings_of_one_name_are_refused() -> None:
    table = Table(Link("norm.{leaf}", "norm.{leaf}"), leaf_aliases={"gamma": "weight"})
    duplicates = stored({"norm.gamma": torch.ones(2), "norm.weight": torch.zeros(2)})
    with pytest.raises(WeightsError, match=r"file: norm\.gamma and norm\.weight are two spellings of one name"):
        dict(table.read(duplicates, {"norm.weight": torch.ones(2)}))


def test_a_prefixed_link_maps_a_nested_model() -> None:
    link = Link("attn.{leaf}", ("q.{leaf}", "k.{leaf}"), Split()).prefixed("text.", "decoder.")
    written = dict(Table(link).write({"decoder.q.bias": torch.zeros(2), "decoder.k.bias": torch.ones(1)}))
    assert torch.equal(written["text.attn.bias"], torch.tensor([0.0, 0.0, 1.0]))


def test_every_mismatch_is_found_before_any_tensor_is_read() -> None:
    log: list[str] = []
    valid = stored(dict(TABLE.write(our_tensors())), log)
    key = "base.h.10.gate_up.weight"
    mismatches = {
        r"file: base\.h\.10\.gate_up\.weight \(3, 9\) is missing": {n: f for n, f in valid.items() if n != key},
        r"gate_up\.weight should be \(3, 9\) by the config, found \(9, 3\)": valid
        | {key: replace(valid[key], shape=(9, 3))},
        "stored as I8; store it as one of F64, F32, F16, BF16": valid | {key: replace(valid[key], dtype="I8")},
        r"base\.h\.11\.attn\.bias \(8,\) belongs to no part of this model": valid
        | {"base.h.11.attn.bias": valid["base.h.0.attn.bias"]},
    }
    for message, tensors in mismatches.items():
        with pytest.raises(WeightsError, match=message):
            read_table(tensors)
    assert not log


def test_a_weight_without_a_link_is_refused() -> None:
    with pytest.raises(WeightsError, match=r"blocks\.0\.sink has no link in this weight table"):
        dict(TABLE.write(our_tensors() | {"blocks.0.sink": torch.zeros(1)}))


def test_the_identity_table_keeps_every_name() -> None:
    assert dict(IDENTITY.write(our_tensors())).keys() == our_tensors().keys()


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
def test_placeholders_match_parts_of_a_name(pattern: str, name: str, expected: dict | None) -> None:
    assert match_placeholders(pattern, name) == expected


TABLE_WITH_DERIVED = Table(
    Link("embed", "embedding.weight"),
    Link("bias", "bias"),
    derived={"bias": torch.zeros, "head": "embed", "sinusoids": torch.ones},
)
EMBEDDING_AND_BIAS = {"embedding.weight": torch.randn(5, 3), "bias": torch.zeros(5)}


def test_derived_tensors_may_be_missing_or_present() -> None:
    embed = {"embed": EMBEDDING_AND_BIAS["embedding.weight"]}
    present = {"head": embed["embed"].clone(), "sinusoids": torch.ones(2, 7), "bias": torch.zeros(5)}
    for theirs in (embed, embed | present):
        read_back = dict(TABLE_WITH_DERIVED.read(stored(theirs), on_meta(EMBEDDING_AND_BIAS)))
        assert all(torch.equal(read_back[name], tensor) for name, tensor in EMBEDDING_AND_BIAS.items())


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            {"head": torch.zeros(5, 3)},
            "file: head should equal embed according to the config, but its values differ; .* tie_word_embeddings",
        ),
        ({"head": torch.zeros(4, 3)}, "head should equal embed"),
        (
            {"sinusoids": torch.full((2,), torch.nan)},
            "sinusoids should be the same in every model of this family, but its values differ",
        ),
    ],
)
def test_derived_tensors_with_other_values_are_refused(extra: dict[str, Tensor], message: str) -> None:
    theirs = stored({"embed": EMBEDDING_AND_BIAS["embedding.weight"]} | extra)
    with pytest.raises(WeightsError, match=message):
        dict(TABLE_WITH_DERIVED.read(theirs, on_meta(EMBEDDING_AND_BIAS)))


def test_a_copy_of_a_missing_tensor_is_refused() -> None:
    table = Table(Link("embed", "embedding.weight"), derived={"embed": "shared"})
    with pytest.raises(WeightsError, match="embed .* is missing"):
        dict(table.read({}, {"embedding.weight": torch.empty(5, 3, device="meta")}))


INNER = Table(
    Link("h.{i}.qkv.{leaf}", ("blocks.{i}.q.{leaf}", "blocks.{i}.k.{leaf}"), Split()),
    Link("wte.weight", "embedding.weight"),
)
OUTER = Table(Link("blk.{i}.attn_qkv.{leaf}", "h.{i}.qkv.{leaf}", Transpose()), Link("embd.weight", "wte.weight"))
CHAIN = Chain(OUTER, INNER)
CHAINED = random_tensors({"embedding.weight": (7, 4), "blocks.3.q.weight": (6, 4), "blocks.3.k.weight": (2, 4)})


def test_a_chain_reads_one_tensor_at_a_time() -> None:
    theirs, log = dict(CHAIN.write(CHAINED)), []
    assert {name: tuple(t.shape) for name, t in theirs.items()} == {
        "embd.weight": (7, 4),
        "blk.3.attn_qkv.weight": (4, 8),
    }
    for name, tensor in CHAIN.read(stored(theirs, log), on_meta(CHAINED)):
        assert torch.equal(tensor, CHAINED[name])
        assert len(log) == (1 if name == "embedding.weight" else 2)
    assert log == ["embd.weight", "blk.3.attn_qkv.weight"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blk.3.attn_qkv.weight": None}, r"blk\.3\.attn_qkv\.weight \(4, 8\) is missing"),
        ({"blk.3.attn_qkv.weight": torch.ones(8, 4)}, r"blk\.3\.attn_qkv\.weight should be \(4, 8\).* found \(8, 4\)"),
        ({"extra": torch.ones(1)}, r"extra \(1,\) belongs to no part"),
    ],
)
def test_errors_of_a_chain_use_the_names_of_the_file(change: dict[str, Tensor | None], message: str) -> None:
    log: list[str] = []
    theirs = {n: t for n, t in (dict(CHAIN.write(CHAINED)) | change).items() if t is not None}
    with pytest.raises(WeightsError, match=message):
        dict(CHAIN.read(stored(theirs, log), on_meta(CHAINED)))
    assert not log
