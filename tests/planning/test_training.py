"""The planned memory of training and of LoRA equals the bytes of real tensors and files."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from regard.adapt import LoRA, add_lora, save_adapter
from regard.adapt.adapters import adapters
from regard.checkpoint.model_folder import save
from regard.planning import plan
from regard.planning.groups import lora_groups
from regard.planning.published import PUBLISHED
from regard.planning.training import (
    ATTENTION,
    BITS_PER_PARAMETER,
    FEEDFORWARD,
    activation_bytes,
    adapted_shapes,
    adapter_parameters,
    episode_bits,
    full_training_bytes,
    lora_parameters,
    lora_training_bytes,
    saved_bytes,
    supervised_bits,
)
from tests.planning.test_cost import SPECS

LLAMA_8B = PUBLISHED["llama-3.1-8b"].spec()


def training_bytes(model: nn.Module) -> dict[str, int]:
    """Bytes of weights, gradients and AdamW's moments after a training step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    optimizer.step()
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return {
        "weights": sum(parameter.nbytes for parameter in model.parameters()),
        "gradients": sum(parameter.grad.nbytes for parameter in trained),
        "moments": sum(moment.nbytes for moment in moments),
    }


@pytest.mark.ledger("tr.optimizer", "calc.train")
@pytest.mark.parametrize("name", ["gqa-tied", "hybrid"])
def test_full_training_holds_sixteen_bytes_per_parameter(name):
    planned = plan(SPECS[name])
    assert training_bytes(SPECS[name].build(seed=0)) == planned.training_bytes
    assert sum(planned.training_bytes.values()) == 16 * planned.parameters


@pytest.mark.ledger("tr.optimizer", "lora.footprint")
def test_training_8b_takes_eight_times_the_memory_of_sampling():
    mixed = full_training_bytes(8 * 10**9, mixed=True)
    assert mixed == {"weights": 16e9, "gradients": 16e9, "float32 copy": 32e9, "moments": 64e9}
    assert sum(mixed.values()) == 128 * 10**9
    base, adapter = plan(LLAMA_8B).parameters, lora_parameters(LLAMA_8B, 16, ("q_proj", "v_proj"))
    added = sum(lora_training_bytes(base, adapter).values()) - 2 * base
    assert round(added / 1e9, 2) == 0.11
    assert sum(lora_training_bytes(base, adapter, "nf4").values()) == -(-base * 4 // 8) + base // 64 * 4 + added


@pytest.mark.ledger("lora.footprint", "calc.lora", "calc.train")
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ATTENTION, FEEDFORWARD, "all-linear"])
def test_training_of_adapters_holds_the_planned_bytes(targets, dora):
    spec = SPECS["gqa-tied"]
    model = spec.build(seed=0)
    base = plan(spec).parameters
    add_lora(model, LoRA(rank=4, targets=targets, dora=dora), seed=0)
    count = sum(parameter.numel() for layer in adapters(model).values() for _, parameter in layer.trained())
    assert count == lora_parameters(spec, 4, targets, dora)
    planned = lora_training_bytes(base, count, "float32")
    found = training_bytes(model)
    assert sum(found.values()) == sum(planned.values())
    assert found["weights"] == planned["frozen base"] + planned["adapters' weights"]


def tensor_bytes(file: Path) -> int:
    """Bytes of the tensors in a safetensors file, without its header."""
    return file.stat().st_size - 8 - int.from_bytes(file.read_bytes()[:8], "little")


@pytest.mark.ledger("calc.lora", "calc.quant")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_saved_tensors_have_the_planned_bytes(tmp_path, dtype):
    spec = SPECS["gqa-untied"]
    model = spec.build(seed=0).to(getattr(torch, dtype))
    save(model, tmp_path / "model")
    assert tensor_bytes(tmp_path / "model" / "model.safetensors") == plan(spec).weight_bytes(dtype)
    add_lora(model, LoRA(rank=4), seed=0)
    save_adapter(model, tmp_path / "adapter")
    itemsize = getattr(torch, dtype).itemsize
    assert tensor_bytes(tmp_path / "adapter" / "adapter_model.safetensors") == itemsize * lora_parameters(spec, 4)


@pytest.mark.ledger("lora.2048", "calc.lora")
def test_rank_16_adds_1_56_percent_to_a_layer_of_2048():
    assert 2048**2 == 4_194_304 and adapter_parameters(16, 2048, 2048) == 65_536
    assert round(100 * 65_536 / 4_194_304, 2) == 1.56


@pytest.mark.ledger("lora.8b", "lora.8b.naive", "lora.ratio", "calc.lora")
def test_rank_16_on_queries_and_values_of_8b_takes_13_mib():
    shapes = adapted_shapes(LLAMA_8B, ("q_proj", "v_proj"))
    assert len(shapes) == 64 and set(shapes.values()) == {(4096, 4096), (1024, 4096)}
    assert adapter_parameters(16, 4096, 4096) == 131_072 and adapter_parameters(16, 4096, 1024) == 81_920
    assert lora_parameters(LLAMA_8B, 16, ("q_proj", "v_proj")) == 6_815_744
    numbers = lora_groups(LLAMA_8B, plan(LLAMA_8B).parameters, 16, ("q_proj", "v_proj"))
    assert numbers["lora_bytes"]["adapter_in_float16"] == 13_631_488 == 13 * 2**20
    naive = 64 * adapter_parameters(16, 4096, 4096)  # if values had as many heads as queries
    assert naive == 8_388_608 and 2 * naive == 16 * 2**20 and 4 * naive == 32 * 2**20
    assert plan(LLAMA_8B).weight_bytes("float16") == 16_060_522_496
    assert numbers["lora"]["times_smaller"] == pytest.approx(1178, abs=1)


@pytest.mark.ledger("lwr.counts", "lwr.bits", "calc.lora")
def test_parameter_counts_equal_those_of_lora_without_regret():
    attention, feedforward = lora_parameters(LLAMA_8B, 256, ATTENTION), lora_parameters(LLAMA_8B, 128, FEEDFORWARD)
    assert (round(attention / 1e9, 3), round(feedforward / 1e9, 3)) == (0.218, 0.226)
    heads = [lora_parameters(LLAMA_8B, rank, ("head",)) for rank in (256, 128)]
    assert (round((attention + heads[0]) / 1e9, 3), round((feedforward + heads[1]) / 1e9, 3)) == (0.252, 0.243)
    rank_one = lora_parameters(LLAMA_8B, 1, (*ATTENTION, *FEEDFORWARD))
    assert (
        rank_one == lora_parameters(LLAMA_8B, 1) == 2_621_440
        and rank_one + lora_parameters(LLAMA_8B, 1, ("head",)) == 2_753_792
    )
    bits = episode_bits(problems=10_000, samples=32)
    assert bits == 320_000 and 8 < rank_one / bits < 9 and BITS_PER_PARAMETER * rank_one > bits


@pytest.mark.ledger("lwr.info", "lwr.bits")
def test_an_episode_has_a_thousandth_of_the_bits_of_its_tokens():
    tokens = 1000  # of an episode, and of a supervised answer at one bit per token
    assert supervised_bits(tokens, math.log(2)) == pytest.approx(1000 * episode_bits(problems=1, samples=1))
    answers = supervised_bits(320_000 * tokens, math.log(2))  # as many answers as the 10,000 · 32 episodes
    assert answers > BITS_PER_PARAMETER * lora_parameters(LLAMA_8B, 1) > episode_bits(10_000, 32)


def test_an_unknown_target_is_refused():
    with pytest.raises(ValueError, match="no linear layer is named 'q_pro'; did you mean 'q_proj'"):
        adapted_shapes(LLAMA_8B, ("q_pro",))


@pytest.mark.ledger("calc.train")
@pytest.mark.parametrize("name", [name for name in SPECS if name.endswith("tied")])
def test_activation_bytes_equal_those_that_autograd_saves(name):
    spec, batch, tokens = SPECS[name], 2, 96
    saved = saved_bytes(spec.build(seed=0), torch.zeros(batch, tokens, dtype=torch.long))
    if name.startswith("gqa"):  # PyTorch's CPU kernel copies shared keys and values for every query head
        saved -= 2 * 2 * batch * tokens * (4 - 2) * 8 * 4  # layers, keys and values; 4 heads of 8 instead of 2
    assert activation_bytes(spec, batch, tokens) == saved
