"""Experts equal a loop over tokens and transformers; capacity, padding, losses, FLOPs and invalid specs."""

import dataclasses
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from regard.layout import TokenLayout
from regard.lens.hooks import patch, record
from regard.models.base import build_on_meta
from regard.models.decoder import Decoder
from regard.models.stack import Repeat, Stack
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.experts import Experts
from regard.parts.feedforward import FeedForward, Gated, SwiGLU
from regard.parts.router import Router
from regard.spec import SpecError

WIDTH, TOKENS = 8, 21
SPECS = {
    "two of four": Experts(4, 2, SwiGLU(12), z=0.001),
    "one of three": Experts(3, 1, FeedForward(12, "relu", bias=False)),
    "three of three": Experts(3, 3, FeedForward(10)),
    "one of one": Experts(1, 1, SwiGLU(12)),
    "biases, odd widths": Experts(5, 2, Gated(7, "gelu", bias=True), router=Router(bias=True)),
    "shared": Experts(4, 2, SwiGLU(12), shared=FeedForward(6)),
    "shared, gated": Experts(4, 2, SwiGLU(12), shared=SwiGLU(6), shared_gate=True),
    "grouped": Experts(
        8, 3, SwiGLU(6), router=Router("sigmoid", correction=True, groups=4, top_groups=2, scale=2.5), balance=0.0
    ),
    "capacity": Experts(4, 2, SwiGLU(12), capacity=0.75),
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def build_randomized(spec: Experts, dtype: torch.dtype = torch.float64) -> nn.Module:
    module = spec.build(WIDTH).to(dtype).eval()
    for n, parameter in enumerate(module.parameters()):
        parameter.data = (random(*parameter.shape, seed=3 + n) * 0.7).to(dtype)
    return module


def layout_of(x: Tensor, valid: Tensor | None = None) -> TokenLayout:
    return (
        TokenLayout.whole(*x.shape[:2])
        if valid is None
        else TokenLayout(torch.arange(x.shape[1]).expand(x.shape[:2]), valid=valid)
    )


def run_with_losses(module: nn.Module, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    losses = {}
    return module(x, layout_of(x, valid).with_losses(losses)), losses


def build_expert(module: nn.Module, spec: Experts, index: int) -> nn.Module:
    """A feed-forward layer with the weights of one expert."""
    feedforward = spec.expert.build(WIDTH).double()
    feedforward.load_state_dict({name: weights[index] for name, weights in module.experts.state_dict().items()})
    return feedforward


def token_by_token(module: nn.Module, spec: Experts, x: Tensor, kept: Tensor | None = None) -> Tensor:
    experts = [build_expert(module, spec, index) for index in range(spec.count)]
    routing, rows = module.router.route(module.router(x.flatten(0, 1))), []
    for token, vector in enumerate(x.flatten(0, 1)):
        y = torch.zeros_like(vector)
        for rank, (index, weight) in enumerate(zip(routing.chosen[token], routing.weights[token], strict=True)):
            if kept is None or kept[token, rank]:
                y = y + weight * experts[int(index)](vector)
        if module.shared is not None:
            gate = 1.0 if module.shared_gate is None else module.shared_gate(vector).sigmoid()
            y = y + gate * module.shared(vector)
        rows.append(y)
    return torch.stack(rows).view_as(x)


@pytest.mark.ledger("moe.layer")
@pytest.mark.parametrize("name", SPECS)
def test_equals_the_loop_over_tokens(name: str) -> None:
    spec, x = SPECS[name], random(3, 7, WIDTH)
    module = build_randomized(spec)
    assert torch.allclose(module(x, layout_of(x)), token_by_token(module, spec, x), atol=1e-12)


@pytest.mark.ledger("moe.stabilise")
@pytest.mark.parametrize("name", SPECS)
def test_gradients_equal_finite_differences(name: str) -> None:
    """Gradients of the output and the losses with respect to the input and every weight."""
    spec, x = SPECS[name], random(1, 7, WIDTH).requires_grad_()
    module = build_randomized(spec).train()
    weights = {name: p for name, p in module.named_parameters() if p.requires_grad}

    def as_function(x: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        layout = layout_of(x).with_losses(losses := {})
        y = torch.func.functional_call(module, dict(zip(weights, values, strict=True)), (x, layout))
        return (y, *losses.values())

    assert gradcheck(as_function, (x, *weights.values()), fast_mode=True)


@pytest.mark.ledger("moe.layer")
@pytest.mark.parametrize("name", ["two of four", "biases, odd widths", "three of three"])
def test_identical_experts_equal_one_feedforward(name: str) -> None:
    spec, x = SPECS[name], random(3, 7, WIDTH)
    module = build_randomized(spec)
    for parameter in module.experts.parameters():
        parameter.data[:] = parameter.data[:1].clone()
    assert torch.allclose(module(x, layout_of(x)), build_expert(module, spec, 0)(x), atol=1e-12)


@pytest.mark.ledger("moe.layer")
def test_only_chosen_experts_affect_the_output() -> None:
    """An expert does not affect tokens that are not routed to it, even if its output is NaN."""
    spec, x = Experts(4, 2, SwiGLU(12)), random(1, 1, WIDTH)
    module = build_randomized(spec)
    before, chosen = module(x, layout_of(x)), module.router.route(module.router(x[0])).chosen[0]
    for index in set(range(4)) - set(chosen.tolist()):
        module.experts.up_proj.weight.data[index] = torch.nan
    assert torch.equal(module(x, layout_of(x)), before)
    module.zero_grad()
    module(x, layout_of(x)).sum().backward()
    assert ((module.experts.down_proj.weight.grad != 0).flatten(1).any(1).nonzero()[:, 0] == chosen.sort().values).all()


@pytest.mark.parametrize("name", SPECS)
def test_a_token_does_not_depend_on_its_batch(name: str) -> None:
    module, x = build_randomized(SPECS[name]), random(3, 7, WIDTH)
    alone = torch.cat([module(token.view(1, 1, -1), layout_of(token.view(1, 1, -1))) for token in x.flatten(0, 1)])
    assert torch.allclose(module(x, layout_of(x)).flatten(0, 1), alone[:, 0], atol=1e-12)


def copy_weights(theirs: nn.Module, ours: nn.Module, router: str = "gate") -> None:
    """Copies our weights into their stacked gate_up_proj (X, 2F, D) and down_proj (X, D, F)."""
    experts = ours.experts
    gate_up = torch.cat([experts.gate_proj.weight, experts.up_proj.weight], 1)
    theirs.experts.gate_up_proj.data = gate_up.detach().clone()
    theirs.experts.down_proj.data = experts.down_proj.weight.detach().clone()
    getattr(theirs, router).weight.data = ours.router.proj.weight.detach().clone()


@pytest.mark.ledger("moe.layer")
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3"])
def test_equals_transformers(name: str) -> None:
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
    from transformers.models.mixtral import modeling_mixtral as mixtral
    from transformers.models.olmoe import modeling_olmoe as olmoe
    from transformers.models.qwen2_moe import modeling_qwen2_moe as qwen2
    from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3

    sizes = {"hidden_size": WIDTH, "num_experts_per_tok": 3, "num_attention_heads": 1, "num_key_value_heads": 1}
    experts = {"num_experts": 8, "moe_intermediate_size": 12}
    groups = {"n_group": 4, "topk_group": 2, "n_shared_experts": 2, "n_routed_experts": 8, "moe_intermediate_size": 12}
    expert = SwiGLU(12)
    block, config, spec = {
        "mixtral": (
            mixtral.MixtralSparseMoeBlock,
            mixtral.MixtralConfig(num_local_experts=8, intermediate_size=12, **sizes),
            Experts(8, 3, expert),
        ),
        "qwen2_moe": (
            qwen2.Qwen2MoeSparseMoeBlock,
            qwen2.Qwen2MoeConfig(shared_expert_intermediate_size=16, norm_topk_prob=False, **experts, **sizes),
            Experts(8, 3, expert, shared=SwiGLU(16), shared_gate=True, router=Router(renormalize=False)),
        ),
        "qwen3_moe": (
            qwen3.Qwen3MoeSparseMoeBlock,
            qwen3.Qwen3MoeConfig(norm_topk_prob=True, **experts, **sizes),
            Experts(8, 3, expert),
        ),
        "olmoe": (
            olmoe.OlmoeSparseMoeBlock,
            olmoe.OlmoeConfig(num_experts=8, intermediate_size=12, norm_topk_prob=False, **sizes),
            Experts(8, 3, expert, router=Router(renormalize=False)),
        ),
        "deepseek_v3": (
            deepseek.DeepseekV3MoE,
            deepseek.DeepseekV3Config(routed_scaling_factor=2.5, **groups, **sizes),
            Experts(
                8,
                3,
                expert,
                shared=SwiGLU(24),
                router=Router("sigmoid", correction=True, groups=4, top_groups=2, scale=2.5),
            ),
        ),
    }[name]
    config._experts_implementation = "eager"
    theirs, ours, x = block(config).eval(), build_randomized(spec, torch.float32), random(3, 7, WIDTH).float()
    copy_weights(theirs, ours)
    if name == "qwen2_moe":
        theirs.shared_expert.load_state_dict(ours.shared.state_dict())
        theirs.shared_expert_gate.load_state_dict(ours.shared_gate.state_dict())
    if name == "deepseek_v3":
        theirs.shared_experts.load_state_dict(ours.shared.state_dict())
        theirs.gate.e_score_correction_bias.copy_(ours.router.correction)
    x.requires_grad_()
    found, expected = ours(x, layout_of(x)), theirs(x.clone())
    assert torch.allclose(found, expected, atol=1e-5)
    grad = random(3, 7, WIDTH, seed=5).float()
    input_gradients = [torch.autograd.grad(y, x, grad)[0] for y in (found, expected)]
    assert torch.allclose(*input_gradients, atol=1e-5)


@pytest.mark.ledger("moe.layer", "moe.capacity")
@pytest.mark.parametrize("capacity", [64, 2])
def test_equals_switch_transformers_with_and_without_dropping(capacity: int) -> None:
    """The batch has one row, because their capacity is per row and ours is per batch."""
    from transformers.models.switch_transformers import modeling_switch_transformers as switch

    count, x = 4, random(1, TOKENS, WIDTH).float()
    config = switch.SwitchTransformersConfig(
        d_model=WIDTH, d_ff=12, num_experts=count, expert_capacity=capacity, router_jitter_noise=0.0, dropout_rate=0.0
    )
    theirs = switch.SwitchTransformersSparseMLP(config).eval()
    factor = capacity * count / TOKENS
    ours = build_randomized(
        Experts(count, 1, FeedForward(12, "relu", bias=False), capacity=factor, balance=0.0), torch.float32
    )
    theirs.router.classifier.load_state_dict(ours.router.proj.state_dict())
    for index in range(count):
        expert = theirs.experts[f"expert_{index}"]
        expert.wi.weight.data = ours.experts.up_proj.weight[index].detach()
        expert.wo.weight.data = ours.experts.down_proj.weight[index].detach()
    y, losses = run_with_losses(ours.train(), x)
    assert torch.allclose(y, theirs(x), atol=1e-5) and losses == {}
    dropped = (y == 0).all(-1).sum()
    assert (dropped > 0) == (capacity == 2)


@pytest.mark.ledger("moe.capacity")
def test_dropped_choices_add_nothing_and_a_tap_records_them() -> None:
    spec, x = Experts(4, 2, SwiGLU(12), capacity=0.75), random(3, 7, WIDTH)
    module, recorded = build_randomized(spec).train(), []
    module.capacity_mask.register_forward_hook(lambda _, __, kept: recorded.append(kept))
    y = module(x, layout_of(x))
    (kept,) = recorded
    assert kept.shape == (TOKENS, 2) and 0 < (~kept).sum() < TOKENS
    assert torch.allclose(y, token_by_token(module.eval(), spec, x, kept), atol=1e-12)
    module(x, layout_of(x))
    assert len(recorded) == 1  # at inference no token is dropped, and the tap is not used


@pytest.mark.ledger("moe.capacity")
@pytest.mark.parametrize("name", ["two of four", "one of three", "shared, gated"])
def test_a_capacity_for_all_tokens_drops_no_token(name: str) -> None:
    spec, x = SPECS[name], random(3, 7, WIDTH)
    with_ample_capacity = dataclasses.replace(spec, capacity=spec.count / spec.top_k)
    unlimited = run_with_losses(build_randomized(spec).train(), x)
    limited = run_with_losses(build_randomized(with_ample_capacity).train(), x)
    assert torch.equal(unlimited[0], limited[0]) and unlimited[1] == limited[1]


def test_padding_uses_no_capacity_and_adds_no_loss() -> None:
    spec = Experts(4, 2, SwiGLU(12), capacity=0.5, z=0.1)
    module, x = build_randomized(spec).train(), random(2, 9, WIDTH)
    valid = torch.tensor([[True] * 9, [False] * 4 + [True] * 5])
    y, losses = run_with_losses(module, x, valid)
    packed = x[valid].unsqueeze(0)
    alone, expected = run_with_losses(module, packed)
    assert torch.allclose(y[valid], alone[0], atol=1e-12) and (y[~valid] == 0).all()
    assert set(losses) == {"balance", "z"}
    assert all(torch.allclose(losses[name], expected[name], atol=1e-14) for name in losses)


def test_losses_are_added_in_training_only() -> None:
    x = random(1, 7, WIDTH)
    for spec, names in (
        (SPECS["two of four"], {"balance", "z"}),
        (SPECS["three of three"], {"balance"}),
        (SPECS["grouped"], set()),
    ):
        module = build_randomized(spec)
        assert run_with_losses(module, x)[1] == {}
        y, losses = run_with_losses(module.train(), x)
        assert set(losses) == names and torch.equal(y, module.eval()(x, layout_of(x)))
        assert all(loss.dim() == 0 and loss > 0 for loss in losses.values())
    doubled = run_with_losses(build_randomized(Experts(4, 2, SwiGLU(12), balance=0.02)).train(), x)[1]
    single = run_with_losses(build_randomized(Experts(4, 2, SwiGLU(12), balance=0.01)).train(), x)[1]
    assert torch.allclose(doubled["balance"], 2 * single["balance"])


def test_a_stack_sums_the_losses_of_its_layers() -> None:
    block = Block((Sublayer(Attention(2)), Sublayer(Experts(4, 2, SwiGLU(12), z=0.1))))
    stack, layer_losses = Stack((Repeat((block,), 3),), WIDTH).double().train(), []
    for layer in stack.blocks:
        layer.register_forward_hook(lambda _, __, out: layer_losses.append(out[1]))
    _, losses = stack(random(2, 7, WIDTH), TokenLayout.whole(2, 7))
    assert len(layer_losses) == 3
    for name in ("balance", "z"):
        assert torch.allclose(losses[name], sum(layer_loss[name] for layer_loss in layer_losses))
    sum(losses.values()).backward()
    assert all(p.grad.abs().max() > 0 for name, p in stack.named_parameters() if name.endswith("router.proj.weight"))
    assert stack.eval()(random(2, 7, WIDTH), TokenLayout.whole(2, 7))[1] == {}


def test_activation_checkpointing_and_compilation_do_not_change_the_losses() -> None:
    """A recomputed or compiled block adds each loss once, with the same gradients."""
    block = Block((Sublayer(Attention(2)), Sublayer(Experts(4, 2, SwiGLU(12), z=0.1)))).build(WIDTH).double().train()
    x, layout = random(2, 7, WIDTH), TokenLayout.whole(2, 7)

    def run(forward: Callable[..., tuple[Tensor, dict[str, Tensor]]]) -> list[Tensor]:
        block.zero_grad()
        y, losses = forward(x, layout)
        assert losses.keys() == {"balance", "z"}
        (y.sum() + sum(losses.values())).backward()
        return [*losses.values(), *(parameter.grad.clone() for parameter in block.parameters())]

    expected = run(block)
    for forward in (partial(checkpoint, block, use_reentrant=False), torch.compile(block, backend="eager")):
        assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(run(forward), expected, strict=True))


def test_the_lens_records_experts_and_patches_the_router() -> None:
    block = Block((Sublayer(Attention(2)), Sublayer(Experts(4, 1, SwiGLU(12)))))
    model, tokens = Decoder(11, WIDTH, (Repeat((block,), 2),)).build(0).eval(), torch.tensor([[1, 2, 3]])
    with record(model, "stack.*") as recorded:
        before = model(tokens)
    body = "stack.blocks.0.sublayers.1.body"
    assert recorded[body].shape == (1, 3, WIDTH) and recorded[f"{body}.router"].shape == (3, 4)
    rolled = recorded[f"{body}.router"].roll(1, -1)
    with patch(model, {f"{body}.router": rolled}), record(model, f"{body}.router") as patched:
        assert not torch.equal(model(tokens), before)
    assert patched.keys() == {f"{body}.router"}


@pytest.mark.parametrize("name", SPECS)
def test_flops_count_the_chosen_experts_only(name: str) -> None:
    spec, x = SPECS[name], random(3, 7, WIDTH)
    flop_formulas = {torch.ops.regard.matmul_slices: lambda x, weight, ends, **_: 2 * x[0] * weight[1] * weight[2]}
    with FlopCounterMode(display=False, custom_mapping=flop_formulas) as counter:
        build_randomized(spec)(x, layout_of(x))
    assert spec.flops(WIDTH, TOKENS, TOKENS) == counter.get_total_flops()


@pytest.mark.ledger("moe.mixtral")
def test_total_and_active_parameters_equal_those_of_mixtral() -> None:
    block = Block((Sublayer(Attention(32, 8)), Sublayer(Experts(8, 2, SwiGLU(14336)))))
    spec = Decoder(32000, 4096, (Repeat((block,), 32),), tied=False)
    total = sum(p.numel() for p in build_on_meta(spec).parameters())
    active = total - sum(sublayer.body.inactive_params(4096) for block in spec.blocks for sublayer in block.sublayers)
    assert (total, active) == (46_702_792_704, 12_879_925_248)
    assert round(100 * active / total, 1) == 27.6 and round(2 * total / 1e9, 1) == 93.4


@pytest.mark.parametrize("name", SPECS)
def test_inactive_parameters_count_the_experts_that_are_not_chosen(name: str) -> None:
    spec = SPECS[name]
    total = sum(p.numel() for p in spec.build(WIDTH).experts.parameters())
    assert spec.inactive_params(WIDTH) == total * (spec.count - spec.top_k) // spec.count


@pytest.mark.parametrize("name", SPECS)
def test_specs_round_trip_through_files(name: str) -> None:
    assert Experts.from_json(SPECS[name].to_json()) == SPECS[name]
    assert Experts.from_toml(SPECS[name].to_toml()) == SPECS[name]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Experts(0, 1, SwiGLU(4)), "count=0 must be positive"),
        (lambda: Experts(4, 5, SwiGLU(4)), "top_k=5 must be from 1 to count=4"),
        (lambda: Experts(4, 2, SwiGLU(4), balance=-1.0), "balance=-1.0 must not be negative"),
        (lambda: Experts(4, 2, SwiGLU(4), capacity=0.0), "capacity=0.0 must be positive"),
        (lambda: Experts(4, 2, SwiGLU(4), shared_gate=True), "shared is None"),
        (lambda: Experts(4, 2, Attention(2)), "expert: expected PositionWise"),
        (lambda: Experts(6, 2, SwiGLU(4), router=Router(groups=4)), "groups=4"),
    ],
)
def test_invalid_specs_are_refused(make: Callable[[], Experts], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make()
