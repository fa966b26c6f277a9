"""Damaged quantized checkpoints: refused with a typed error that names the tensor, or loaded; never a crash."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from regard.adapt.quantized import QuantizedLinear
from regard.checkpoint import CheckpointError, load
from regard.families import FamilyError
from regard.formats.integers import Integer
from regard.spec import SpecError
from regard.weights.table import WeightsError
from tests.checkpoint.foreign_quantized.packers import Packed, Packer, compressed, fp8, gptq, write_pair
from tests.checkpoint.foreign_quantized.test_reading import CASES, LLAMA, linears
from tests.checkpoint.mutations import VALUES
from tests.checkpoint.test_mutations import is_refused

TYPED_ERRORS = (CheckpointError, WeightsError, FamilyError, SpecError)
LAYER = "model.layers.0.self_attn.q_proj"
SMALL = LLAMA | {"num_hidden_layers": 1}


def nf4(shape: tuple[int, int], rng: torch.Generator) -> Packed:
    """NF4 in blocks of 64 with double quantization."""
    from regard.formats.nf4 import NF4, dynamic_levels, normal_levels

    weight = torch.randn(shape, generator=rng) / 8
    stored, format = NF4().quantize(weight), NF4()
    state = {
        "quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(shape), "nested_blocksize": 256,
        "nested_dtype": "float32", "nested_offset": stored["scale_mean"].item(),
    }  # fmt: skip
    tensors = {
        "weight": (stored["codes"] >> 4 | stored["codes"] << 4).view(-1, 1), "weight.absmax": stored["scale"],
        "weight.quant_map": normal_levels().clone(), "weight.nested_quant_map": dynamic_levels().clone(),
        "weight.nested_absmax": stored["scale_scale"],
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }  # fmt: skip
    return tensors, format.dequantize(stored).double()


def int8(shape: tuple[int, int], rng: torch.Generator) -> Packed:
    codes, scale = torch.randint(-127, 128, shape, generator=rng), torch.rand(shape[0], generator=rng)
    return {"weight": codes.to(torch.int8), "SCB": scale}, codes * scale.double()[:, None] / 127


def e5m2(shape: tuple[int, int], rng: torch.Generator) -> Packed:
    tensors, weight = fp8((32, 16))(shape, rng)
    return tensors | {"weight": tensors["weight"].float().to(torch.float8_e5m2)}, weight


def grouped(shape: tuple[int, int], rng: torch.Generator) -> Packed:
    tensors, weight = compressed(4, 32, False)(shape, rng)
    return tensors | {"weight_g_idx": torch.full(shape[1:], -1, dtype=torch.int32)}, weight


KINDS: dict[str, tuple[Packer, dict[str, Any]]] = {
    "gptq": CASES["gptq 4 sym"][:2],
    "gptq 3": CASES["gptq 3"][:2],
    "awq": CASES["awq gemm"][:2],
    "gemv": CASES["awq gemv"][:2],
    "fp8": CASES["fp8 blocks"][:2],
    "fp8 e5m2": (e5m2, CASES["fp8 blocks"][1]),
    "nf4": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "int8": (int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "packed": (grouped, CASES["ct packed 4 zeros"][1]),
    "naive": CASES["ct naive 4"][:2],
}


def state(**changes: Any) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        value = json.loads(bytes(tensor.tolist())) | changes
        return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)

    return change


def filled(value: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: torch.full_like(tensor, value)


def with_code(code: int) -> Callable[[Tensor], Tensor]:
    """The first number of a tensor in FP8 replaced by the one with these bits."""

    def change(tensor: Tensor) -> Tensor:
        changed = tensor.clone()
        changed.view(torch.uint8)[0, 0] = code
        return changed

    return change


STATE = "weight.quant_state.bitsandbytes__nf4"
DAMAGES: list[tuple[str, str, Callable[[Tensor], Tensor | None], str]] = [
    ("gptq", "scales", lambda _: None, r"q_proj.scales is missing"),
    ("gptq", "qzeros", lambda _: None, r"q_proj.qzeros is missing"),
    ("gptq", "scales", filled(float("nan")), r"q_proj.scales has values that are not finite"),
    ("gptq", "scales", lambda x: x[:-1], r"q_proj.scales should be \(4, 64\) in F16 or BF16 or F32, found \(3, 64\)"),
    ("gptq", "scales", lambda x: x.int(), r"q_proj.scales should be .*, found \(4, 64\) in I32"),
    ("gptq", "qweight", lambda x: x[:-1], r"q_proj.scales|q_proj.qweight|q_proj.g_idx"),
    ("gptq", "qweight", lambda x: x.long(), r"q_proj.qweight should be .* in I32, found \(8, 64\) in I64"),
    ("gptq", "qweight", lambda x: x.flatten(), r"q_proj.qweight should be a matrix, found \(512,\)"),
    ("gptq", "qweight", lambda x: x[:0], r"q_proj.qweight should be a matrix"),
    ("gptq", "qzeros", filled(0), r"q_proj.qzeros should be 8 everywhere, because the config says sym"),
    ("gptq", "g_idx", filled(4), r"q_proj.g_idx should have groups from 0 to 3"),
    ("gptq", "g_idx", filled(-1), r"q_proj.g_idx should have groups from 0 to 3"),
    ("gptq", "qweight", lambda _: None, r"belongs to no part of this model|is missing"),
    ("awq", "scales", lambda _: None, r"q_proj.scales is missing"),
    ("awq", "qzeros", lambda x: x[:1], r"q_proj.qzeros should be \(4, 8\) in I32"),
    ("awq", "scales", filled(float("inf")), r"q_proj.scales has values that are not finite"),
    ("awq", "qzeros", lambda _: None, r"q_proj.qzeros is missing"),
    ("gemv", "qzeros", lambda _: None, r"q_proj.qzeros is missing"),
    ("gemv", "scales", lambda x: x[:, :0], r"q_proj.scales should be a matrix"),
    ("fp8", "weight_scale_inv", lambda x: x[:1], r"q_proj.weight_scale_inv should be \(2, 4\) or"),
    ("fp8", "weight_scale_inv", filled(float("nan")), r"weight_scale_inv has values that are not finite"),
    ("fp8", "weight_scale_inv", lambda _: None, r"q_proj.weight is stored as F8_E4M3; store it as one of"),
    ("fp8", "weight", lambda x: x.float(), r"q_proj.weight should be \(64, 64\) in F8_E4M3 or F8_E5M2, found"),
    ("fp8", "weight", with_code(0x7F), "q_proj.weight has values that are not finite"),
    ("fp8", "weight", with_code(0xFF), "q_proj.weight has values that are not finite"),
    ("fp8", "weight", with_code(0x7E), None),  # 448, the largest
    ("fp8 e5m2", "weight", with_code(0x7C), "q_proj.weight has values that are not finite"),
    ("fp8 e5m2", "weight", with_code(0x7B), None),  # 57344, the largest
    ("nf4", STATE, lambda x: x[:-1], "nf4 is not valid JSON"),
    ("nf4", STATE, lambda _: torch.tensor([91, 93], dtype=torch.uint8), "nf4 is not a JSON object"),
    ("nf4", STATE, state(shape=[64]), "nf4 should have a shape of two sizes and a blocksize"),
    ("nf4", STATE, state(shape=[1 << 30, 1 << 30]), "q_proj.weight should have the .* bytes of"),
    ("nf4", STATE, state(blocksize=0), "should have a shape of two sizes and a blocksize"),
    ("nf4", STATE, state(blocksize=32), r"q_proj.weight.absmax should be \(128,\) in U8, found \(64,\)"),
    ("nf4", STATE, state(nested_offset=float("nan")), "should have a nested_offset that float32 holds, found nan"),
    ("nf4", STATE, state(nested_offset=-1e300), r"should have a nested_offset that float32 holds, found -1e\+300"),
    ("nf4", STATE, state(nested_offset=3e38), None),
    ("nf4", "weight.quant_map", filled(float("nan")), "weight.quant_map has values that are not finite"),
    ("nf4", "weight.nested_quant_map", filled(float("inf")), "nested_quant_map has values that are not finite"),
    ("nf4", STATE, state(nested_blocksize=1 << 30), None),  # one block, as before
    ("nf4", "weight.absmax", lambda x: x.float(), r"q_proj.weight.absmax should be \(64,\) in U8"),
    ("nf4", "weight.nested_absmax", filled(float("nan")), "nested_absmax has values that are not finite"),
    ("nf4", "weight.quant_map", lambda x: x[:8], r"quant_map should be \(16,\) in F32"),
    ("nf4", "weight.nested_quant_map", lambda _: None, "nested_quant_map is missing"),
    ("int8", "SCB", lambda x: x[:8], r"q_proj.SCB should be \(64,\) in F32"),
    ("int8", "SCB", filled(float("nan")), "SCB has values that are not finite"),
    ("int8", "weight", lambda x: x.view(torch.uint8), r"q_proj.weight should be \(64, 64\) in I8"),
    ("packed", "weight_shape", lambda _: torch.tensor([1 << 40, 64]), "weight_shape should be two sizes"),
    ("packed", "weight_shape", lambda _: torch.tensor([64, 72]), r"weight_packed should be \(64, 9\) in I32"),
    ("packed", "weight_shape", lambda _: torch.tensor([64.0, 64.0]), "weight_shape should be .* in I64 or I32"),
    ("packed", "weight_zero_point", lambda _: None, "weight_zero_point is missing"),
    ("packed", "weight_scale", lambda _: None, "weight_scale is missing"),
    ("packed", "weight_g_idx", filled(9), "weight_g_idx should have groups from 0 to 1"),
    ("naive", "weight", filled(100), "q_proj.weight has values that are no integers of 4 bits"),
    ("naive", "weight_scale", filled(float("nan")), "weight_scale has values that are not finite"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        kind: write_pair(tmp_path_factory.mktemp(kind.replace(" ", "")), SMALL, *case)[0]
        for kind, case in KINDS.items()
    }


@pytest.mark.parametrize(
    ("kind", "leaf", "damage", "message"),
    DAMAGES,
    ids=[f"{n} {kind} {leaf}" for n, (kind, leaf, *_) in enumerate(DAMAGES)],
)
def test_a_damaged_tensor_is_named(
    kind: str, leaf: str, damage: Any, message: str | None, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(folders[kind], tmp_path / "copy"))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    changed = damage(tensors.pop(f"{LAYER}.{leaf}"))
    if changed is not None:
        tensors[f"{LAYER}.{leaf}"] = changed.contiguous()
    save_file(tensors, file)
    if message is None:
        load(folder)
        return
    with pytest.raises(TYPED_ERRORS, match=message):
        load(folder)


@pytest.mark.filterwarnings("ignore:.*quantized weights become ordinary ones:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_every_change_of_settings_and_tensors_is_loaded_or_refused(
    kind: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(folders[kind], tmp_path / "copy"))
    load(folder)
    random, refused = Random(kind), 0
    config, file = folder / "config.json", folder / "model.safetensors"
    settings, content = config.read_text(), file.read_bytes()
    names = [name for name in load_file(file) if "layers." in name]
    for trial in range(40):
        if trial % 2:
            changed = json.loads(settings)
            target = changed["quantization_config"]
            nested = target.get("config_groups", {}).get("group_0", {})
            tables = [table for table in (target, nested, nested.get("weights")) if table]
            table = random.choice(tables)
            table[random.choice(sorted(table))] = random.choice(VALUES)
            config.write_text(json.dumps(changed))
        else:
            tensors = load_file(file)
            name = random.choice(names)
            x = tensors.pop(name)
            options = [None, x[:-1] if x.dim() else None, x.unsqueeze(0), x.view(torch.uint8) if x.dim() else None]
            options += [torch.zeros_like(x), x.flip(0) if x.dim() else None, x.repeat(2) if x.dim() == 1 else None]
            if (new := random.choice(options)) is not None:
                tensors[name] = new.contiguous()
            save_file(tensors, file)
        refused += is_refused(folder)
        config.write_text(settings)
        file.write_bytes(content)
    assert refused > 10


def test_a_group_larger_than_the_weight_is_one_group(tmp_path: Path) -> None:
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 1 << 40, "sym": True}
    square = SMALL | {"intermediate_size": 64}
    folder, _ = write_pair(tmp_path, square, gptq(4, 64, True), settings)
    assert not is_refused(folder)


@pytest.mark.parametrize(("kind", "leaf"), [("gptq", "qweight"), ("awq", "qweight"), ("packed", "weight_packed")])
def test_a_layer_with_packed_and_ordinary_weights_is_refused(
    kind: str, leaf: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(folders[kind], tmp_path / "copy"))
    file = folder / "model.safetensors"
    save_file(load_file(file) | {f"{LAYER}.weight": torch.zeros(64, 64)}, file)
    with pytest.raises(
        CheckpointError, match=rf"q_proj.{leaf} is stored beside .*q_proj.weight, but a layer has one w"
    ):
        load(folder)


def test_awq_without_zero_points_has_zeros_of_8(folders: dict[str, Path], tmp_path: Path) -> None:
    """zero_point: false; stored zero points must say the same."""
    folder = Path(shutil.copytree(folders["awq"], tmp_path / "copy"))
    config, file = folder / "config.json", folder / "model.safetensors"
    settings, tensors = json.loads(config.read_text()), load_file(file)
    eights = {k: torch.full_like(v, -0x77777778) if k.endswith("qzeros") else v for k, v in tensors.items()}
    save_file(eights, file)
    expected = linears(load(folder))
    settings["quantization_config"]["zero_point"] = False
    config.write_text(json.dumps(settings))
    for changed in (eights, {k: v for k, v in tensors.items() if not k.endswith("qzeros")}):
        save_file(changed, file)
        for name, layer in linears(load(folder)).items():
            assert isinstance(layer, QuantizedLinear) and layer.format == Integer(4, True, 16, "float16")
            assert torch.equal(layer.weight, expected[name].weight), name
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match="q_proj.qzeros should be 8 everywhere, because the config says zero_po"):
        load(folder)
