"""The plan of a training run: memory per device, FLOPs and time, and the check that a model fits into memory."""

import json
import time
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from regard.checkpoint import save
from regard.models.decoder import Decoder
from regard.models.heads import MaskedLM
from regard.models.presets import bert, transformer_2017
from regard.parts.experts import Experts
from regard.parts.feedforward import SwiGLU
from regard.planning import machine, plan
from regard.planning.activations import activation_memory, block_activations, parameter_count, rough_activation_bytes
from regard.planning.machine import check_memory, machine_memory, measure_cpu
from regard.planning.published import PUBLISHED, llama, rotary, scaled_llama
from regard.planning.speed import DEVICES
from regard.planning.training import activation_bytes, full_training_bytes
from regard.planning.training_plan import ParallelSplit, TrainingJob, logit_bytes
from regard.text.train import byte
from regard.training.parallel.mesh import DIMENSIONS
from regard.training_run import train
from tests.cli.conftest import regard
from tests.planning.test_cost import SPECS

SETTINGS = SimpleNamespace(accumulate=1, optimizer=SimpleNamespace(kind="adamw"))
SMALL = llama(4, 64, rotary(4, 2), SwiGLU(160), 100, 128)


@pytest.mark.parametrize("name", list(SPECS))
def test_activations_by_block_equal_those_of_the_whole_model(name: str) -> None:
    assert activation_memory(SPECS[name], 2, 96) == pytest.approx(activation_bytes(SPECS[name], 2, 96), rel=0.03)


def test_activations_of_encoders_and_experts_are_counted() -> None:
    encoder = bert(vocab=100, width=64, layers=2, heads=4, hidden=128)
    decoder = transformer_2017()
    experts = llama(2, 64, rotary(4), Experts(count=4, top_k=2, expert=SwiGLU(128)), 100, 128)
    for spec in (encoder, decoder, experts):
        stream = 2 * 32 * 4 * 64
        assert activation_memory(spec, 2, 32) > 10 * stream
        assert activation_memory(spec, 2, 32) > activation_memory(spec, 2, 32, checkpointing=True)


def test_checkpointing_keeps_one_input_per_block_and_all_of_one_block() -> None:
    stream = 2 * 128 * 64 * 4
    (block,) = SMALL.layers[0].blocks
    saved = block_activations(block, 64, 2, 128, mixed=False).saved
    assert activation_memory(SMALL, 2, 128) == 4 * saved + 3 * stream
    assert activation_memory(SMALL, 2, 128, checkpointing=True) == 4 * stream + saved + 3 * stream
    assert activation_memory(SMALL, 2, 128, mixed=True) < activation_memory(SMALL, 2, 128)
    rough = rough_activation_bytes(SMALL, 2, 128)
    assert 0.5 < rough / activation_memory(SMALL, 2, 128) < 1.2


def test_memory_is_divided_by_shards_and_tensor_parts() -> None:
    job = TrainingJob(SMALL, rows=16, length=128, steps=10)
    one = job.memory()
    expected = full_training_bytes(plan(SMALL).parameters)
    assert (one["weights"], one["gradients"], one["optimizer"]) == tuple(expected.values())
    for split in (ParallelSplit(shard=4), ParallelSplit(tensor=4), ParallelSplit(shard=2, tensor=2)):
        divided = job.memory(split)
        assert divided["weights"] == -(-plan(SMALL).parameters // 4) * 4
        assert divided["activations"] < one["activations"]
    assert job.memory(ParallelSplit(replicate=4))["weights"] == one["weights"]
    assert (
        job.memory(ParallelSplit(replicate=4))["activations"] == TrainingJob(SMALL, 4, 128, 10).memory()["activations"]
    )
    assert replace(job, accumulate=4).memory()["activations"] == TrainingJob(SMALL, 4, 128, 10).memory()["activations"]
    mixed = replace(job, mixed=True).memory()
    assert mixed["bfloat16 copies"] == one["weights"] // 2 and mixed["activations"] < one["activations"]
    assert replace(job, optimizer="sgd").memory()["optimizer"] == one["weights"]


def test_the_roles_of_devices_are_those_of_a_recipe() -> None:
    assert {field.name for field in fields(ParallelSplit)} == set(DIMENSIONS)
    assert (
        str(ParallelSplit(replicate=2, context=2)) == "replicate=2, context=2" and str(ParallelSplit()) == "one device"
    )


def test_context_divides_tokens_and_expert_divides_experts() -> None:
    job = TrainingJob(SMALL, rows=4, length=128, steps=10)
    context = job.memory(ParallelSplit(context=4))
    assert context["weights"] == job.memory()["weights"], "DDP"
    assert context["activations"] == replace(job, length=32).memory()["activations"]
    assert job.exchange(ParallelSplit(context=4))["context"] == 3 * 3 * 4 * 4 * 32 * 4 * (2 * 2 * 16)  # layers · (k, v)
    assert job.memory(ParallelSplit(shard=2, context=4))["weights"] == -(-plan(SMALL).parameters // 8) * 4

    mixture = llama(2, 64, rotary(4), Experts(count=4, top_k=2, expert=SwiGLU(128)), 100, 128)
    job = TrainingJob(mixture, rows=8, length=16, steps=10)
    experts, others = 2 * 4 * 3 * 64 * 128, plan(mixture).parameters - 2 * 4 * 3 * 64 * 128
    assert job.expert_parameters == experts
    assert job.memory(ParallelSplit(expert=4))["weights"] == 4 * -(-others // 4) + experts
    assert job.memory(ParallelSplit(tensor=2))["weights"] == 4 * (-(-others // 2) + experts)
    assert job.memory(ParallelSplit(replicate=2, expert=2))["weights"] == 4 * -(-others // 2) + experts
    sent = job.exchange(ParallelSplit(expert=2))
    assert sent["expert"] == 4 * (8 * 16 / 2) * 4 * 2 * (2 * 64) / 2 and sent["replicate"] == 0
    assert job.seconds_per_step(DEVICES["h100"], ParallelSplit(expert=2)) > 0


def test_logits_are_those_of_one_chunk() -> None:
    assert logit_bytes(SMALL, 32, mixed=False) == 32 * 100 * 8 + 4 * 100 * 64
    encoder = bert(vocab=100, width=64, layers=2, heads=4, hidden=128)
    assert logit_bytes(replace(encoder, head=MaskedLM()), 32, mixed=False) == 32 * 100 * 8 + 4 * 100 * 64
    assert logit_bytes(encoder, 32, mixed=False) == 0
    large = replace(SMALL, vocab=1 << 20)
    assert logit_bytes(large, 10**6, mixed=True) == 64 * (1 << 20) * 2 + 4 * 64 * (1 << 20)  # as many tokens as width


def test_flops_are_6nd_and_attention() -> None:
    job = TrainingJob(PUBLISHED["llama-7b"].spec(), rows=1, length=2048, steps=1)
    flops = job.flops
    lookups = 6 * 32000 * 4096 * 2048  # 6ND counts the embedding, which is only looked up
    assert flops["total"] == pytest.approx(flops["6ND"] - lookups + flops["of query-key pairs"], rel=1e-3)
    assert job.tokens == 2048


def test_time_falls_with_devices_and_rises_with_exchange() -> None:
    job, h100 = TrainingJob(scaled_llama(8), rows=64, length=1024, steps=1, mixed=True), DEVICES["h100"]
    one = job.seconds_per_step(h100)
    assert one == pytest.approx(job.flops_per_step / (0.4 * h100.flops) + 28 * job.costs.parameters / h100.bandwidth)
    assert one / 8 < job.seconds_per_step(h100, ParallelSplit(replicate=8)) < one / 4
    assert job.seconds_per_step(h100, utilization=0.2) > 1.9 * one
    assert job.seconds_per_step(h100, checkpointing=True) > 1.3 * one
    slow = replace(h100, link=10**8)
    for split in (ParallelSplit(replicate=8), ParallelSplit(shard=8), ParallelSplit(tensor=8)):
        assert job.seconds_per_step(slow, split) > job.seconds_per_step(h100, split)


def test_the_smallest_split_fits_and_half_of_it_does_not() -> None:
    job = TrainingJob(scaled_llama(32), rows=64, length=2048, steps=1, mixed=True)
    for name in ("rtx4090", "h100"):
        split = job.smallest_split(DEVICES[name], checkpointing=True)
        assert split is not None and job.fits(DEVICES[name], split, checkpointing=True)
        half = ParallelSplit(shard=split.shard // 2, tensor=split.tensor)
        assert not job.fits(DEVICES[name], half, checkpointing=True)
    assert job.smallest_split(replace(DEVICES["h100"], memory=10**6)) is None
    with pytest.raises(ValueError, match="split: shard=0 must be at least 1"):
        ParallelSplit(shard=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"width": 10**7},
            r"needs at least .* PB, but this machine has .*B; the largest part is optimizer state: .* PB",
        ),
        ({"vocab": 10**13}, r"needs at least .* PB, but this machine has"),
        ({"layers": 10**8}, r"needs at least .* TB, but this machine has"),
        ({"width": 10**12}, r"this model is too large: .*overflow"),
    ],
)
def test_absurd_sizes_are_refused_at_once(change: dict[str, int], message: str) -> None:
    if "layers" in change:
        change = {"layers": (replace(SMALL.layers[0], times=change["layers"]),)}
    start = time.process_time()
    with pytest.raises(ValueError, match=message):
        check_memory(replace(SMALL, **change), SETTINGS, "cpu", 8, 128)
    assert time.process_time() - start < 5


def test_only_what_cannot_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_memory(SMALL, SETTINGS, "cpu", 8, 128)
    weights = 16 * plan(SMALL).parameters
    monkeypatch.setattr(machine, "machine_memory", lambda device: weights)
    check_memory(SMALL, SETTINGS, "cpu")
    with pytest.raises(ValueError, match="the largest part is activations"):
        check_memory(SMALL, SETTINGS, "cpu", 64, 128)
    monkeypatch.setattr(machine, "machine_memory", lambda device: weights - 1)
    with pytest.raises(ValueError, match="the largest part is optimizer state"):
        check_memory(SMALL, SETTINGS, "cpu")
    check_memory(SMALL, SETTINGS, "cpu", trained=100)  # adapters
    check_memory(SMALL, SETTINGS, "cpu", processes=2)
    needed = weights + activation_memory(SMALL, 4, 128)
    monkeypatch.setattr(machine, "machine_memory", lambda device: needed)
    check_memory(SMALL, SimpleNamespace(accumulate=2, optimizer=SETTINGS.optimizer), "cpu", 8, 128)
    with pytest.raises(ValueError, match="needs at least"):
        check_memory(SMALL, SETTINGS, "cpu", 8, 128)


def test_deep_models_are_counted_without_building_all_layers() -> None:
    deep = replace(SMALL, layers=(replace(SMALL.layers[0], times=1500),))
    shallow, one_more = (replace(SMALL, layers=(replace(SMALL.layers[0], times=n),)) for n in (1, 2))
    per_layer = parameter_count(one_more) - parameter_count(shallow)
    assert parameter_count(deep) == parameter_count(shallow) + 1499 * per_layer
    tied = replace(SMALL, layers=(replace(SMALL.layers[0], times=1500, tied=True),))
    assert parameter_count(tied) == parameter_count(shallow)


def test_a_model_that_does_not_fit_is_refused_by_training(tmp_path: Path) -> None:
    options = ("--tokenizer.by=byte", "--model.width=6000000")
    refused = regard("train", "llama", "--out", tmp_path / "run", *options, "--device", "cpu")
    assert isinstance(refused.exception, ValueError)
    assert "needs at least" in str(refused.exception) and "but this machine has" in str(refused.exception)
    with pytest.raises(ValueError, match="the largest part is optimizer state"):
        train("llama", tmp_path / "run", {"tokenizer.by": "byte", "model.width": 6_000_000}, device="cpu")
    assert not (tmp_path / "run").exists()


def test_this_machine_is_measured() -> None:
    device = measure_cpu(size=64, seconds=0.01)
    assert device.flops > 10**7 and device.bandwidth > 10**7
    assert device.memory == machine_memory() > 10**8
    assert torch.get_default_dtype() == torch.float32


def planned(*arguments: str) -> dict:
    result = regard("plan", "train", *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_tuning_a_model_is_planned_with_its_adapter(tmp_path: Path) -> None:
    model = llama(2, 16, rotary(2), SwiGLU(32), byte().vocab_size, 64).build(seed=0)
    save(model, tmp_path / "model", byte())
    data = planned("dpo", "--from", str(tmp_path / "model"), "--adapter.rank=2", "--rows", "2")
    trained = sum(2 * (p.shape[0] + p.shape[1]) for n, p in model.named_parameters() if p.ndim == 2 and "stack" in n)
    assert data["run"]["parameters"] == sum(p.numel() for p in model.parameters())
    assert data["run"]["trained_parameters"] == trained
    assert regard("plan", "train", "7B", "--from", str(tmp_path / "model")).exit_code == 2


def test_a_recipe_is_planned_on_all_devices(tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_text("x" * 4096)
    source = ("--data.source=text", f"--data.path={tmp_path / 'my.txt'}", "--tokenizer.by=byte", "--train.steps=4")
    data = planned("llama", *source)
    assert data["run"]["tokens"] == 4 * 8 * 256 and data["run"]["epochs_estimated_from_file_sizes"] == 2.0
    assert set(data["devices"]) == set(DEVICES) and data["devices"]["h100"]["fits_on"] == 1
    text = regard("plan", "train", "llama", *source).output
    assert "40% of the peak FLOP/s" in text and "rtx4090" in text


def test_a_size_is_planned_on_several_devices() -> None:
    data = planned("7B", "--gpus", "8xh100", "--rows", "64", "--length", "2048", "--steps", "10")
    assert data["fits"] == "with activation checkpointing" and data["split"] == "shard=8"
    assert data["memory_bytes_per_device"]["weights"] == pytest.approx(4 * 7.3e9 / 8, rel=0.02)
    assert data["time"]["total_seconds"] == pytest.approx(10 * data["time"]["seconds_per_step"])
    tensor = planned("7B", "--gpus", "8xh100", "--split", "tensor=4", "--rows", "64", "--utilization", "0.5")
    assert tensor["split"] == "shard=2, tensor=4", "the remaining devices shard, as in a recipe"
    assert set(tensor["exchange_bytes_per_step_and_device"]) == {"shard", "tensor"}
    experts = planned("mixtral-8x7b", "--gpus", "16xh100", "--split", "expert=8", "--rows", "64", "--length", "512")
    assert set(experts["exchange_bytes_per_step_and_device"]) == {"shard", "expert"}
    context = planned("7B", "--gpus", "8xh100", "--split", "replicate=2,context=4", "--rows", "2", "--length", "8192")
    assert set(context["exchange_bytes_per_step_and_device"]) == {"replicate", "context"}
    assert isinstance(PUBLISHED["llama-7b"].spec(), Decoder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("7B", "--gpus", "8h100"), "--gpus 8h100 is not a number of devices"),
        (("7B", "--gpus", "٨xh100"), "--gpus ٨xh100 is not a number of devices"),
        (("7B", "--gpus", "h10"), "did you mean 'h100'"),
        (("7B", "--gpus", "8xh100", "--split", "shard=4"), "uses 4 devices, but --gpus has 8"),
        (("7B", "--gpus", "h100", "--split", "shards=1"), "write it as replicate=2,shard=4"),
        (("7B", "--gpus", "2xh100", "--split", "data=2"), "the names are those of train.parallel: replicate, shard"),
        (("7B", "--gpus", "2xh100", "--split", "expert=2"), "expert=2: this model has no experts; use shard"),
        (("mamba", "--gpus", "2xh100", "--split", "context=2"), "mamba reads the whole sequence"),
        (("no-such-recipe",), "neither a file or folder nor a known name"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[str, ...], message: str) -> None:
    assert message in str(regard("plan", "train", *arguments).exception)
    assert regard("plan", "train", "7B", "--split", "shard=2").exit_code == 2


def test_adapters_are_trained_and_the_model_is_frozen() -> None:
    job = TrainingJob(SMALL, rows=8, length=128, steps=10, trained=1000)
    whole = replace(job, trained=None)
    assert job.memory()["gradients"] == 4000 and job.memory()["optimizer"] == 8000
    assert job.memory()["weights"] == whole.memory()["weights"] + 4000
    assert job.flops_per_step == pytest.approx(whole.flops_per_step * 2 / 3)


def test_recipes_of_other_models_and_of_adapters_are_planned(tmp_path: Path, demo_run: Path) -> None:
    encoder = bert(vocab=100, width=64, layers=2, heads=4, hidden=128).to_dict()
    del encoder["input"]["vocab"]
    steps, tokenizer = "[train]\nsteps = 3\n", "[tokenizer]\nby = 'byte'\n"
    (tmp_path / "encoder.toml").write_text(f"model = {toml(encoder)}\n{steps}{tokenizer}")
    assert planned(str(tmp_path / "encoder.toml"))["run"]["parameters"] > 261 * 64
    adapter = "[adapter]\nrank = 2\ntargets = 'all-linear'\n"
    (tmp_path / "tuned.toml").write_text(f"from = '{demo_run}'\n{adapter}{steps}")
    tuned = planned(str(tmp_path / "tuned.toml"))
    assert 0 < tuned["run"]["trained_parameters"] < tuned["run"]["parameters"] / 5


def toml(value: object) -> str:
    """A value as an inline TOML value; tables leave out None."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(entry)}" for key, entry in value.items() if entry is not None) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)
