"""Quantized checkpoints of other libraries: equal to the same weights in float64, with their codes kept."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from regard.adapt.quantized import QuantizedLinear
from regard.adapt.w8a8 import W8A8Linear
from regard.checkpoint import CheckpointError, load, save
from regard.families import FamilyError
from regard.formats.base import NumberFormat
from regard.formats.floats import Float
from regard.formats.integers import Integer
from tests.checkpoint.foreign_quantized.packers import Packer, awq, compressed, fp8, gptq, write_pair

SIZES = {"vocab_size": 40, "num_hidden_layers": 2, "max_position_embeddings": 32}
LLAMA = SIZES | {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "attention_bias": True,
}  # fmt: skip
PHI3 = LLAMA | {"model_type": "phi3", "attention_bias": False, "pad_token_id": 0, "rms_norm_eps": 1e-5}
NEOX = SIZES | {"model_type": "gpt_neox", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 2, "attention_bias": False}
GPT2 = {"model_type": "gpt2", "vocab_size": 40, "n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 32}
IDS = torch.arange(24).view(2, 12)


def ct(bits: int, group: int | None, symmetric: bool, layout: str, **extra: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "channel"}
    if group is not None:
        weights |= {"strategy": "group", "group_size": group}
    entry = {"targets": ["Linear"], "weights": weights, "input_activations": None} | extra
    return {
        "quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": entry},
        "ignore": ["lm_head"],
    }  # fmt: skip


def ct_float(strategy: str, **sizes: Any) -> dict[str, Any]:
    settings = ct(8, None, True, "float-quantized")
    settings["config_groups"]["group_0"]["weights"] = {"num_bits": 8, "type": "float", "strategy": strategy, **sizes}
    return settings


def gptq_settings(bits: int, group: int, **extra: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, **extra}


TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
FP8 = {"quant_method": "fp8", "weight_block_size": [32, 16]}
E4M3 = "float8_e4m3fn"
CASES: dict[str, tuple[Packer, dict[str, Any], NumberFormat]] = {
    "gptq 4 sym": (gptq(4, 16, True), gptq_settings(4, 16, sym=True), Integer(4, True, 16, "float16")),
    "gptq 4": (gptq(4, 32, False), gptq_settings(4, 32, sym=False), Integer(4, False, 32, "float16")),
    "gptq v2 4": (
        gptq(4, 32, False, v2=True), gptq_settings(4, 32, sym=False, checkpoint_format="gptq_v2"),
        Integer(4, False, 32, "float16"),
    ),
    "gptq 2": (gptq(2, 16, False), gptq_settings(2, 16), Integer(2, False, 16, "float16")),
    "gptq 3": (gptq(3, 32, False), gptq_settings(3, 32, sym=False), Integer(3, False, 32, "float16")),
    "gptq 8 sym": (gptq(8, 16, True), gptq_settings(8, 16, sym=True), Integer(8, True, 16, "float16")),
    "gptq v2 8": (
        gptq(8, 16, False, v2=True), gptq_settings(8, 16, checkpoint_format="gptq_v2"),
        Integer(8, False, 16, "float16"),
    ),
    "awq gemm": (
        awq("gemm", 16), {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True},
        Integer(4, False, 16, "float16"),
    ),
    "awq gemv": (
        awq("gemv", 32), {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "GEMV"},
        Integer(4, False, 32, "float16"),
    ),
    "fp8 blocks": (fp8((32, 16)), FP8, Float(E4M3, 16)),
    "fp8 cut rows": (fp8((40, 32)), FP8 | {"weight_block_size": [40, 32]}, Float(E4M3, 32)),
    "fp8 large blocks": (fp8((128, 128)), FP8 | {"weight_block_size": [128, 128]}, Float(E4M3)),
    "fp8 tensor": (fp8(None), {"quant_method": "fp8", "activation_scheme": "dynamic"}, Float(E4M3)),
    "fbgemm": (fp8(None, True, "weight_scale"), {"quant_method": "fbgemm_fp8"}, Float(E4M3)),
    "ct packed 4": (compressed(4, 16, True), ct(4, 16, True, "pack-quantized"), Integer(4, True, 16, "bfloat16")),
    "ct packed 4 zeros": (
        compressed(4, 32, False), ct(4, 32, False, "pack-quantized"), Integer(4, False, 32, "bfloat16"),
    ),
    "ct packed 3": (
        compressed(3, 32, False, dtype="float16"), ct(3, 32, False, "pack-quantized"), Integer(3, False, 32, "float16"),
    ),
    "ct packed 8": (
        compressed(8, None, True, dtype="float32"), ct(8, None, True, "pack-quantized"), Integer(8),
    ),
    "ct int 8": (
        compressed(8, None, True, False, "float32"), ct(8, None, True, "int-quantized"), Integer(8),
    ),
    "ct int 8 zeros": (
        compressed(8, 16, False, False), ct(8, 16, False, "naive-quantized"), Integer(8, False, 16, "bfloat16"),
    ),
    "ct naive 4": (
        compressed(4, 16, True, False), ct(4, 16, True, "naive-quantized"), Integer(4, True, 16, "bfloat16"),
    ),
    "ct float": (fp8(None, True, "weight_scale"), ct_float("channel"), Float(E4M3)),
    "ct float tensor": (fp8(None, False, "weight_scale"), ct_float("tensor"), Float(E4M3)),
    "ct float blocks": (
        fp8((32, 16), False, "weight_scale"), ct_float("block", block_structure=[32, 16]), Float(E4M3, 16),
    ),
    "ct float groups": (
        fp8((1, 16), False, "weight_scale"), ct_float("group", group_size=16), Float(E4M3, 16),
    ),
}  # fmt: skip


def linears(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers of the blocks."""
    kinds = (nn.Linear, QuantizedLinear)
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds) and name != "head"}


def check_equal(quantized: nn.Module, plain: nn.Module) -> None:
    """The same weights and logits in float64."""
    for (name, ours), expected in zip(linears(quantized).items(), linears(plain).values(), strict=True):
        assert torch.equal(ours.weight, expected.weight), name
    with torch.no_grad():
        found, logits = quantized(IDS), plain(IDS)
    torch.testing.assert_close(found, logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_codes_are_kept_and_are_the_weights_of_the_loops(case: str, tmp_path: Path) -> None:
    pack, settings, format = CASES[case]
    quantized, plain = (load(folder, dtype=torch.float64) for folder in write_pair(tmp_path, LLAMA, pack, settings))
    layers = linears(quantized)
    assert len(layers) == 14
    for layer in layers.values():
        assert isinstance(layer, QuantizedLinear) and layer.format == format
    check_equal(quantized, plain)


@pytest.mark.parametrize("case", ["gptq 4", "gptq 3", "awq gemm", "fp8 blocks", "ct packed 4 zeros", "ct int 8"])
@pytest.mark.parametrize("config", [PHI3, NEOX], ids=["phi3", "gpt_neox"])
def test_fused_projections_are_split_by_rows_of_codes(config: dict[str, Any], case: str, tmp_path: Path) -> None:
    """GPT-NeoX's rows of queries, keys and values alternate per head."""
    pack, settings, format = CASES[case]
    quantized, plain = (load(folder, dtype=torch.float64) for folder in write_pair(tmp_path, config, pack, settings))
    for layer in linears(quantized).values():
        assert isinstance(layer, QuantizedLinear) and layer.format == format
    check_equal(quantized, plain)


@pytest.mark.parametrize(
    ("case", "config", "kept"),
    [
        ((gptq(4, 16, True, shuffled=True), gptq_settings(4, 16, sym=True, desc_act=True)), LLAMA, 0),
        ((gptq(8, 16, False), gptq_settings(8, 16)), LLAMA, 0),
        ((fp8((32, 40)), FP8 | {"weight_block_size": [32, 40]}), LLAMA, 0),
        (CASES["gptq 4"][:2], MIXTRAL, 8),
        (CASES["awq gemm"][:2], GPT2, 0),
    ],
    ids=["act-order", "zeros of 256", "cut columns", "stacked experts", "transposed"],
)
def test_other_weights_are_dequantized_and_this_is_said_once(
    case: tuple[Packer, dict[str, Any]], config: dict[str, Any], kept: int, tmp_path: Path
) -> None:
    folder, plain = write_pair(tmp_path, config, *case)
    with pytest.warns(UserWarning, match="quantized weights become ordinary ones, with the same numbers; ") as warned:
        quantized = load(folder, dtype=torch.float64)
    assert len(warned) == 1
    assert sum(isinstance(layer, QuantizedLinear) for layer in quantized.modules()) == kept
    check_equal(quantized, load(plain, dtype=torch.float64))


def test_layers_that_the_config_leaves_out_stay(tmp_path: Path) -> None:
    settings = gptq_settings(4, 16, sym=True, modules_to_not_convert=["down_proj"], dynamic={"-:.*down_proj": {}})
    folder, plain = write_pair(tmp_path, LLAMA, gptq(4, 16, True), settings, skip="down_proj")
    quantized = load(folder, dtype=torch.float64)
    kept = [name for name, layer in linears(quantized).items() if isinstance(layer, QuantizedLinear)]
    assert len(kept) == 12 and not any("down_proj" in name for name in kept)
    check_equal(quantized, load(plain, dtype=torch.float64))


def test_layers_have_the_group_of_their_name_first(tmp_path: Path) -> None:
    """Groups by class, pattern and name, whose layers have other bits."""
    settings = ct(4, 16, True, "mixed-precision")
    groups = settings["config_groups"]
    eight = ct(8, 32, False, "")["config_groups"]["group_0"] | {"targets": [r"re:.*\.(q|k)_proj$"]}
    two = ct(2, 16, True, "")["config_groups"]["group_0"] | {"targets": ["model.layers.1.self_attn.q_proj"]}
    groups |= {"group_1": eight, "group_2": two}
    for entry in groups.values():
        entry["format"] = "pack-quantized"
    order = iter(())

    def pack(shape: tuple[int, int], rng: torch.Generator):
        return next(order)(shape, rng)

    def packer(name: str) -> Packer:
        if name == "model.layers.1.self_attn.q_proj.weight":
            return compressed(2, 16, True)
        return compressed(8, 32, False) if ".q_proj." in name or ".k_proj." in name else compressed(4, 16, True)

    names = [
        f"model.layers.{i}.{part}.weight"
        for i in range(2)
        for part in (
            "mlp.down_proj", "mlp.gate_proj", "mlp.up_proj", "self_attn.k_proj", "self_attn.o_proj",
            "self_attn.q_proj", "self_attn.v_proj",
        )
    ]  # fmt: skip
    order = iter([packer(name) for name in names])
    folder, plain = write_pair(tmp_path, LLAMA, pack, settings)
    quantized = load(folder, dtype=torch.float64)
    bits = [layer.format.bits for name, layer in linears(quantized).items() if name.endswith("q_proj")]  # ty: ignore
    assert bits == [8, 2]
    check_equal(quantized, load(plain, dtype=torch.float64))


def test_int8_inputs_of_each_token_are_rounded(tmp_path: Path) -> None:
    pack = compressed(8, None, True, False, "float32")
    settings = ct(8, None, True, "int-quantized", input_activations=TOKEN)
    folder, _ = write_pair(tmp_path, LLAMA, pack, settings)
    model = load(folder)
    assert sum(isinstance(layer, W8A8Linear) for layer in model.modules()) == 14
    settings["config_groups"]["group_0"]["input_activations"] = TOKEN | {"dynamic": False}
    (tmp_path / "other").mkdir()
    folder, _ = write_pair(tmp_path / "other", LLAMA, pack, settings)
    assert not any(isinstance(layer, W8A8Linear) for layer in load(folder).modules())


def test_scales_of_inputs_are_not_used_and_this_is_said(tmp_path: Path) -> None:
    def pack(shape: tuple[int, int], rng: torch.Generator):
        tensors, weight = fp8(None, False, "weight_scale")(shape, rng)
        return tensors | {"input_scale": torch.tensor(0.1), "k_scale": torch.tensor(0.1)}, weight

    folder, plain = write_pair(tmp_path, LLAMA, pack, ct_float("tensor"))
    with pytest.warns(UserWarning, match="28 tensors such as .* are not used, because inputs of layers"):
        quantized = load(folder, dtype=torch.float64)
    check_equal(quantized, load(plain, dtype=torch.float64))


def test_an_imported_folder_has_the_same_numbers(tmp_path: Path) -> None:
    pack, settings, _ = CASES["gptq 4"]
    model = load(write_pair(tmp_path, LLAMA, pack, settings)[0])
    save(model, tmp_path / "saved", source_family="llama")
    saved = load(tmp_path / "saved")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, saved.state_dict()[name]), name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "hqq"}, r"the method 'hqq', which is not read; the methods that are read are gptq, awq"),
        ("gptq", "the method 'gptq'"),
        ({}, "the method None"),
        (gptq_settings(5, 16), "bits=5 must be one of 2, 3, 4, 8"),
        (gptq_settings(4, 16, checkpoint_format="marlin"), "checkpoint_format='marlin' is not read, only 'gptq' and"),
        (gptq_settings(4, 16, dynamic={"+:.*": {"bits": 8}}), "changes settings of single layers"),
        (gptq_settings(4, 0), "group_size=0 must be positive, or -1"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv_fast"}, "version='gemv_fast' is not read, only 'gemm'"),
        ({"quant_method": "awq", "bits": 3}, "bits=3 must be 4"),
        ({"quant_method": "fp8", "weight_block_size": [0, 1]}, "weight_block_size=.* must be two positive integers"),
        ({"quant_method": "bitsandbytes"}, "load_in_8bit=False: nothing is quantized; remove"),
        (ct(4, 16, True, "nvfp4-pack-quantized"), "format='nvfp4-pack-quantized' is not read, only pack-quantized"),
        (ct(4, 16, True, "pack-quantized") | {"config_groups": 3}, "must be objects with a list of targets"),
        (ct(4, 16, True, "pack-quantized") | {"sparsity_config": {"format": "x"}}, "sparsity_config=.* is not read"),
    ],
)
def test_settings_that_are_not_read_are_refused_by_name(settings: Any, message: str, tmp_path: Path) -> None:
    folder, _ = write_pair(tmp_path, LLAMA | {"num_hidden_layers": 1}, gptq(4, 16, True), settings)
    with pytest.raises((CheckpointError, FamilyError), match=message):
        load(folder)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"targets": ["re:(a+)+$"]}, "is too complex a pattern"),
        ({"targets": ["re:("]}, "is not a valid pattern"),
        ({"targets": ["Conv1d"]}, "has no targets with model.layers.0"),
        ({"weights": {"num_bits": 4, "type": "float"}}, "num_bits=4 is not read for type='float'"),
        ({"weights": {"num_bits": 9}}, "num_bits=9 of type 'int' is not read"),
        ({"weights": {"num_bits": 4, "strategy": "tensor_group"}}, "strategy='tensor_group' is not read"),
        ({"weights": {"num_bits": 4, "strategy": "block"}}, "block_structure=None must be two positive integers"),
        ({"weights": {"num_bits": 4, "strategy": "group", "group_size": -1}}, "group_size=-1 must be positive"),
    ],
)
def test_groups_of_layers_that_are_not_read_are_refused(entry: Any, message: str, tmp_path: Path) -> None:
    settings = ct(4, 16, True, "pack-quantized", **entry)
    folder, _ = write_pair(tmp_path, LLAMA | {"num_hidden_layers": 1}, compressed(4, 16, True), settings)
    with pytest.raises((CheckpointError, FamilyError), match=message):
        load(folder)
