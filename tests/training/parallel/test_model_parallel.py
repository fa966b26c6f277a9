"""Matrices, sequences and experts distributed over processes: the steps of one process, and refusals by name."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from regard.adapt.tensor_plan import divide_heads, plan_of
from regard.data.batch import Batch
from regard.kernels.linear_cross_entropy import VocabularyShard, linear_cross_entropy
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.experts import Experts
from regard.parts.feedforward import FeedForward, SwiGLU
from regard.parts.norm import RMSNorm
from regard.parts.position.alibi import Alibi
from regard.parts.position.rope import Rope
from regard.spec import SpecError
from regard.training.parallel.context_parallel import check_context, split_columns
from regard.training.parallel.distribute import distribute
from regard.training.parallel.mesh import Parallel, Processes
from regard.training.parallel.sharded_files import whole_tensor
from tests.training.parallel.processes import (
    DENSE,
    MIXTURE,
    SPEC,
    batches,
    build,
    largest_difference,
    run_in_processes,
    train,
    train_parallel,
)

GATED = Attention(4, 2, position=Rope(), gate="head", bias=True, qk_norm=RMSNorm())
BIASED = replace(  # an untied head with a bias, biased projections and gates; ALiBi has no plan and is replicated
    DENSE,
    vocab=53,  # cannot be divided: embedding and head are replicated
    layers=(
        Repeat((Block((Sublayer(GATED), Sublayer(FeedForward(24)))),)),
        Repeat((Block((Sublayer(Attention(4, position=Alibi())), Sublayer(SwiGLU(24)))),)),
    ),
    tied=False,
    head_bias=True,
)


HEAD = replace(DENSE, tied=False, head_bias=True, softcap=20.0, logit_scale=0.5)


def check_specs(processes: Processes, specs: dict[str, Decoder]) -> None:
    """The curves in float64 and float32 with accumulation, and the weights at the end of the first."""
    for name, spec in specs.items():
        for dtype, tolerance, steps in ((torch.float64, 1e-10, 4), (torch.float32, 1e-5, 20)):
            expected, model = build(spec, dtype), build(spec, dtype)
            curve = train(expected, batches(steps, dtype=dtype))
            found, _ = train_parallel(model, processes, steps, accumulate=2, dtype=dtype)
            assert largest_difference(found, curve) <= tolerance, (name, dtype)
            for (path, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
                difference = (whole_tensor(p).detach() - q).abs().max()
                assert difference <= 1e-9 or dtype == torch.float32, (name, path)  # Adam divides by tiny gradients


def check_vocabulary(processes: Processes) -> None:
    """The loss of logits that are distributed by rows of the head: loss, correct predictions and gradients."""
    mesh = processes.submesh("tensor")
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, weights = (
        torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((9, 6), (14, 6), (14,), (9,))
    )
    weight[9] = weight[2]  # equal logits in both processes: the first one is predicted
    targets, weights = torch.tensor([0, 6, 7, 13, 2, 9, 5, 8, 3]), weights.abs() * (torch.arange(9) != 4)
    rows = slice(processes.rank * 7, (processes.rank + 1) * 7)
    shard = VocabularyShard(mesh.get_group(), rows.start, 14)
    for has_bias in (False, True):
        for options in ((1.0, None, 9, 0.0, 0.0), (0.7, 3.0, 4, 0.1, 0.2), (1.0, 2.0, 2, 0.0, 0.1)):
            whole = [t.clone().requires_grad_() for t in (x, weight, bias)]
            parts = [t.clone().requires_grad_() for t in (x, weight[rows], bias[rows])]
            results = []
            for (inputs, matrix, vector), where in ((whole, None), (parts, shard)):
                added = vector if has_bias else None
                loss, correct = linear_cross_entropy(inputs, matrix, targets, weights, added, *options, shard=where)
                (3 * loss).backward()
                results.append((loss, correct))
            torch.testing.assert_close(*results, atol=1e-12, rtol=1e-12)
            for full, part, index in zip(whole, parts, (slice(None), rows, rows), strict=True):
                if full.grad is not None:
                    torch.testing.assert_close(part.grad, full.grad[index], atol=1e-12, rtol=1e-12)


def check_tensor(processes: Processes, specs: dict[str, Decoder]) -> None:
    check_vocabulary(processes)
    check_specs(processes, specs)
    model, batch = build(SPEC), batches(1, processes)[0]
    expected = model(batch.tokens)
    forward_model, _ = distribute(model, processes)
    logits = forward_model(batch.tokens, outputs=True).logits
    assert len(logits.weight.to_local()) == SPEC.vocab // 2, "not gathered for the loss"
    torch.testing.assert_close(logits.materialize(), expected, atol=1e-12, rtol=1e-12)


def test_two_processes_share_the_vocabulary_and_take_the_steps_of_one(tmp_path: Path) -> None:
    run_in_processes(check_tensor, Parallel(tensor=2), 2, tmp_path, {"tied": SPEC, "biased": BIASED, "head": HEAD})


@pytest.mark.parametrize(
    ("parallel", "specs"),
    [
        (Parallel(shard=1, context=2), {"dense": DENSE}),
        (Parallel(shard=1, expert=2), {"experts": MIXTURE}),
    ],
    ids=["context", "expert"],
)
def test_two_processes_take_the_steps_of_one(parallel: Parallel, specs: dict[str, Decoder], tmp_path: Path) -> None:
    run_in_processes(check_specs, parallel, 2, tmp_path, specs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "specs"),
    [
        (Parallel(tensor=2), {"tied": SPEC, "biased": BIASED}),
        (Parallel(context=2), {"dense": DENSE}),
        (Parallel(shard=1, context=2, tensor=2), {"dense": DENSE}),
        (Parallel(expert=2), {"experts": MIXTURE}),
        (Parallel(replicate=2, shard=1, expert=2), {"experts": MIXTURE}),
    ],
    ids=["shard and tensor", "shard and context", "context and tensor", "shard and expert", "replicate and expert"],
)
def test_four_processes_take_the_steps_of_one(parallel: Parallel, specs: dict[str, Decoder], tmp_path: Path) -> None:
    run_in_processes(check_specs, parallel, 4, tmp_path, specs)


def attention(**options) -> nn.Module:
    return Attention(**({"heads": 4, "kv_heads": 2} | options)).build(16)


def test_heads_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(SpecError, match="kv_heads=2 is not divisible by tensor=4; choose tensor from 1, 2"):
        plan_of(attention(), 4, False)
    with pytest.raises(SpecError, match="hidden width 25 .* not divisible by tensor=2; choose tensor from 1, 5, 25"):
        plan_of(SwiGLU(25).build(16), 2, False)


@pytest.mark.parametrize(
    "options",
    [{"sinks": True}, {"position": Alibi()}, {"dropout": 0.1}, {"qk_norm": RMSNorm(), "norm_over": "all"}],
    ids=str,
)
def test_attention_that_needs_all_heads_is_replicated(options: dict) -> None:
    assert plan_of(attention(**options), 2, False) == {}


def test_a_plan_changes_nothing_until_heads_are_divided() -> None:
    module = nn.ModuleDict({"mixer": attention(gate="head")})
    plans = {"mixer": plan_of(module["mixer"], 2, False)}

    def heads() -> tuple[int, int, int]:
        return module["mixer"].heads, module["mixer"].kv_heads, module["mixer"].gate.heads

    assert plans["mixer"]["q_proj"] == "outputs" and heads() == (4, 2, 4)
    assert divide_heads(module, plans, 2) == {module["mixer"]} and heads() == (2, 1, 2)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (SPEC, "linear_attention reads the whole sequence"),
        (replace(DENSE, ahead=DENSE.layers[0].blocks), "does not support ahead blocks"),
        (replace(DENSE, layers=(Repeat((Block((Sublayer(Attention(4, dropout=0.1)),)),)),)), "no dropout in attention"),
    ],
)
def test_models_that_read_the_whole_sequence_are_refused(spec: Decoder, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        check_context(spec)


def test_fields_that_cannot_be_split_are_refused() -> None:
    batch = Batch(tokens=torch.zeros(2, 8, dtype=torch.long), labels=torch.zeros(2))
    assert split_columns(batch, Processes()) is batch
    with pytest.raises(SpecError, match=r"splits fields of shape \(2, 8\), but labels has \(2,\)"):
        split_columns(batch, Processes(Parallel(shard=1, context=2)))


def check_refusals(processes: Processes, message: str, spec: Decoder) -> None:
    with pytest.raises(SpecError, match=message):
        train_parallel(build(spec), processes, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "message", "spec"),
    [
        (Parallel(shard=1, expert=2), "expert=2, but this model has no experts", DENSE),
        (
            Parallel(shard=1, expert=2),
            "3 experts cannot be divided by expert=2; choose expert from 1, 3",
            replace(DENSE, layers=(Repeat((Block((Sublayer(Experts(3, 1, SwiGLU(8))),)),)),)),
        ),
    ],
)
def test_experts_that_cannot_be_divided_are_refused(
    parallel: Parallel, message: str, spec: Decoder, tmp_path: Path
) -> None:
    run_in_processes(check_refusals, parallel, 2, tmp_path, message, spec)
