"""Random mutations of a model folder: values of a config or index, entries of a header, single bytes."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from regard.checkpoint import export
from regard.families import FAMILIES, family
from tests.families.cases import classic, decoders, encoder_decoders, encoders, experts, recurrent, vision

CASE_MODULES = (classic, decoders, encoders, encoder_decoders, experts, recurrent, vision)
NESTED: Any = "x"
for _ in range(60):
    NESTED = {"rope_type": NESTED, "type": [NESTED]} if isinstance(NESTED, str) else [NESTED]
VALUES = [
    0, -1, 1, 2, 3, 7, 48, 1 << 20, 1 << 31, 1 << 62, 1 << 63, 10**30, -(10**30), 0.5, -0.5, 2.0, 1e308, 1e-320,
    float("nan"), float("inf"), "", "xyz", "x" * 100_000, "nan", "../../etc/passwd", "é\x00\ud800", None, True, False,
    [], {}, [1], [[1]], {"a": 1}, ["attention"] * 20_000, [0] * 100_000, list(range(3)), NESTED, "gelu", "relu", "silu",
]  # fmt: skip
Mutation = Callable[[bytes, Random], bytes]


def configs() -> Iterator[tuple[str, dict[str, Any]]]:
    """The first test config of every family, by `model_type`."""
    first: dict[str, dict[str, Any]] = {}
    for architecture, settings in (case for module in CASE_MODULES for case in module.CASES.values()):
        lower = architecture.lower()
        matches = [name for name in FAMILIES if lower.startswith(name.replace("_", "").removesuffix("text"))]
        model_type = max(matches, key=len)
        first.setdefault(model_type, settings | {"model_type": model_type, "architectures": [architecture]})
    yield from first.items()


def export_folders(base: Path, families: tuple[str, ...]) -> list[Path]:
    """Export one model of each family; the manifests are removed, because they would detect every change."""
    for model_type, config in configs():
        if model_type in families:
            export(family(model_type).spec(config).build(0), base / model_type, model_type)
            (base / model_type / "manifest.json").unlink()
    return sorted(base.iterdir())


def locations(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every location in nested data, as its container and its key or index; of a long list the first hundred."""
    for key in list(tree) if isinstance(tree, dict) else range(min(len(tree), 100)):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from locations(tree[key])


def copied(tree: Any) -> Any:
    """A deep copy of JSON, ten times faster than `deepcopy`, which keeps a record of every number."""
    if isinstance(tree, dict):
        return {key: copied(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [copied(value) if isinstance(value, dict | list) else value for value in tree]
    return tree


def change_a_value(content: bytes, random: Random) -> bytes:
    tree = json.loads(content)
    for _ in range(random.choice([1, 1, 1, 2, 4])):
        node, key = random.choice(list(locations(tree)) or [({0: 0}, 0)])
        chance = random.random()
        if chance < 0.15 and isinstance(node, dict):
            del node[key]
        elif chance < 0.25 and isinstance(node, dict):
            node[random.choice(["nan", "NaN", "", "auto_map", f"{key} ", "x" * 700])] = node.pop(key)
        elif chance < 0.4 and isinstance(node[key], int):
            node[key] += random.choice([-1, 1, node[key], 10**6])
        elif chance < 0.55:
            other_node, other_key = random.choice(list(locations(tree)) or [(node, key)])
            node[key] = copied(other_node[other_key])
        else:
            node[key] = copied(random.choice(VALUES))
    return json.dumps(tree).encode()


def change_the_header(content: bytes, random: Random) -> bytes:
    """Change names, dtypes, shapes or offsets; the header remains valid JSON."""
    length = int.from_bytes(content[:8], "little")
    header = change_a_value(content[8 : 8 + length], random)
    declared = random.choice([len(header)] * 8 + [len(header) + 1, len(header) - 1, 1 << 40, (1 << 64) - 1])
    return declared.to_bytes(8, "little") + header + content[8 + length :]


def change_dtypes(content: bytes, random: Random) -> bytes:
    old, new = random.sample([b'"F32"', b'"F16"', b'"I32"', b'"BF16"', b'"F64"', b'"F8_E4M3"', b'"F4"', b"nan"], 2)
    return content.replace(old if old in content else b'"F32"', new, random.choice([1, -1]))


def change_bytes(content: bytes, random: Random) -> bytes:
    changed = bytearray(content)
    for _ in range(random.choice([1, 3])):
        changed[random.randrange(min(len(changed), random.choice([8, 600])))] = random.randrange(256)
    return bytes(changed[: random.randrange(len(changed))] if random.random() < 0.1 else changed)


JSON_FILES: tuple[Mutation, ...] = (change_a_value, change_a_value, change_a_value, change_bytes)
TENSOR_FILES: tuple[Mutation, ...] = (change_the_header, change_the_header, change_dtypes, change_bytes)


def mutate(file: Path, random: Random) -> bytes:
    return random.choice(JSON_FILES if file.suffix == ".json" else TENSOR_FILES)(file.read_bytes(), random)
