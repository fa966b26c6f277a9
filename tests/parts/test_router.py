"""The choices, weights, losses and capacity of the router equal plain Python and transformers."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from regard.parts.router import Router, RouterModule, Routing, balance_loss, within_capacity, z_loss
from regard.spec import SpecError

WIDTH, EXPERTS, TOKENS = 10, 8, 40


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def build_randomized(spec: Router, top_k: int, dtype: torch.dtype = torch.float64) -> RouterModule:
    module = spec.build(WIDTH, EXPERTS, top_k).to(dtype).eval()
    for n, parameter in enumerate(module.parameters()):
        parameter.data = random(*parameter.shape, seed=3 + n).to(dtype)
    return module


ROUTERS = {
    "softmax": (Router(), 2),
    "softmax, not renormalized": (Router(renormalize=False), 3),
    "top one": (Router(), 1),
    "all experts": (Router(), EXPERTS),
    "sigmoid, corrected, scaled": (Router("sigmoid", correction=True, scale=2.5), 3),
    "bias": (Router(bias=True), 2),
    "groups by best expert": (Router(groups=4, top_groups=2, group_best=1, scale=16.0, renormalize=False), 3),
    "groups by best two experts": (Router("sigmoid", correction=True, groups=4, top_groups=1), 2),
    "groups of one": (Router(groups=8, top_groups=3), 2),
}


def route(module: RouterModule, x: Tensor) -> Routing:
    return module.route(module(x))


def route_one_token(logits: list[float], correction: list[float], spec: Router, top_k: int) -> dict[int, float]:
    """Returns the weight of each chosen expert of one token, the best first."""
    if spec.scores == "softmax":
        total = sum(map(math.exp, logits))
        scores = [math.exp(logit) / total for logit in logits]
    else:
        scores = [1 / (1 + math.exp(-logit)) for logit in logits]
    corrected = [score + c for score, c in zip(scores, correction, strict=True)]
    size = EXPERTS // spec.groups
    groups = [corrected[start : start + size] for start in range(0, EXPERTS, size)]
    group_scores = [sum(sorted(group, reverse=True)[: spec.group_best]) for group in groups]
    best = sorted(range(spec.groups), key=lambda group: -group_scores[group])[: spec.top_groups]
    candidates = [expert for expert in range(EXPERTS) if expert // size in best]
    chosen = sorted(candidates, key=lambda expert: -corrected[expert])[:top_k]
    renormalize = top_k > 1 if spec.renormalize is None else spec.renormalize
    total = sum(scores[expert] for expert in chosen) if renormalize else 1.0
    return {expert: scores[expert] / total * spec.scale for expert in chosen}


@pytest.mark.ledger("moe.router")
@pytest.mark.parametrize("name", ROUTERS)
def test_choices_and_weights_equal_plain_python(name: str) -> None:
    spec, top_k = ROUTERS[name]
    module, x = build_randomized(spec, top_k), random(TOKENS, WIDTH)
    routing = route(module, x)
    correction = [0.0] * EXPERTS if module.correction is None else module.correction.tolist()
    for token, logits in enumerate(module.proj(x).tolist()):
        expected = route_one_token(logits, correction, spec, top_k)
        found = dict(zip(routing.chosen[token].tolist(), routing.weights[token].tolist(), strict=True))
        assert list(found) == list(expected)  # the best first
        assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.ledger("moe.router")
def test_softmax_after_the_choice_equals_renormalized_softmax() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssTopKRouter
    from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralTopKRouter

    x, module = random(TOKENS, WIDTH).float(), build_randomized(Router(bias=True), 3, torch.float32)
    routing = route(module, x)
    expected = routing.logits.gather(-1, routing.chosen).softmax(-1)
    assert torch.allclose(routing.weights, expected, atol=1e-6)
    sizes = {"hidden_size": WIDTH, "num_local_experts": EXPERTS, "num_experts_per_tok": 3}
    theirs = GptOssTopKRouter(GptOssConfig(**sizes))  # softmax after the choice
    theirs.load_state_dict(module.proj.state_dict())
    _, weights, chosen = theirs(x)
    assert torch.equal(routing.chosen, chosen) and torch.allclose(routing.weights, weights, atol=1e-6)
    module.proj.bias.data.zero_()
    theirs = MixtralTopKRouter(MixtralConfig(**sizes))  # softmax before the choice
    theirs.weight.data = module.proj.weight.data
    _, weights, chosen = theirs(x)
    assert torch.equal(route(module, x).chosen, chosen) and torch.allclose(route(module, x).weights, weights, atol=1e-6)


@pytest.mark.parametrize("groups", [1, 4])
def test_equals_the_routers_of_deepseek(groups: int) -> None:
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Config, DeepseekV2TopkRouter
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3TopkRouter

    sizes = {
        "hidden_size": WIDTH,
        "num_attention_heads": 1,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": 3,
        "n_group": groups,
        "topk_group": min(groups, 2),
        "routed_scaling_factor": 2.5,
    }
    x, grouping = random(TOKENS, WIDTH).float(), {"groups": groups, "top_groups": min(groups, 2), "scale": 2.5}
    method = "group_limited_greedy" if groups > 1 else "greedy"
    v2 = DeepseekV2TopkRouter(DeepseekV2Config(topk_method=method, **sizes))
    v3 = DeepseekV3TopkRouter(DeepseekV3Config(norm_topk_prob=True, **sizes))
    for theirs, spec in (
        (v2, Router(renormalize=False, group_best=1, **grouping)),
        (v3, Router("sigmoid", correction=True, **grouping)),
    ):
        ours = build_randomized(spec, 3, torch.float32)
        theirs.weight.data = ours.proj.weight.data
        if ours.correction is not None:
            theirs.e_score_correction_bias.copy_(ours.correction)
        _, weights, chosen = theirs(x)
        their_order, routing = chosen.argsort(-1), route(ours, x)
        our_order = routing.chosen.argsort(-1)
        assert torch.equal(routing.chosen.gather(-1, our_order), chosen.gather(-1, their_order))
        assert torch.allclose(routing.weights.gather(-1, our_order), weights.gather(-1, their_order), atol=1e-6)


def test_a_correction_changes_the_choice_and_not_the_weights() -> None:
    module, x = build_randomized(Router("sigmoid", correction=True, renormalize=False), 2), random(TOKENS, WIDTH)
    module.correction.data = torch.eye(EXPERTS)[5] * 10
    routing = route(module, x)
    assert (routing.chosen[:, 0] == 5).all()
    assert torch.equal(routing.weights, routing.scores.gather(-1, routing.chosen))
    assert not module.correction.requires_grad


@pytest.mark.ledger("moe.stabilise")
@pytest.mark.parametrize("spec", [Router(noise=True), Router(jitter=0.3)], ids=["noise", "jitter"])
def test_noise_acts_in_training_only(spec: Router) -> None:
    module, x = build_randomized(spec, 2), random(TOKENS, WIDTH)
    assert torch.equal(module(x), module(x))
    assert torch.equal(module(x), module.proj(x))
    module.train()
    torch.manual_seed(0)
    first, second = module(x), module(x)
    assert (first != second).all() and ((first - module.proj(x)).mean(0).abs() < 1).all()
    route(module, x).weights[:, 0].sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in module.parameters())


@pytest.mark.ledger("moe.stabilise")
def test_noise_has_the_predicted_deviation() -> None:
    module, x = build_randomized(Router(noise=True), 2).train(), random(1, WIDTH)
    torch.manual_seed(0)
    noise = torch.cat([module(x) - module.proj(x) for _ in range(4000)])
    deviation = torch.nn.functional.softplus(module.noise_proj(x))[0]
    assert torch.allclose(noise.std(0), deviation, rtol=0.05)


@pytest.mark.ledger("moe.stabilise")
@pytest.mark.parametrize("name", ROUTERS)
def test_gradients_reach_the_router(name: str) -> None:
    spec, top_k = ROUTERS[name]
    module = build_randomized(spec, top_k)
    route(module, random(TOKENS, WIDTH)).weights[:, 0].sum().backward()
    assert module.proj.weight.grad.abs().max() > 1e-3


@pytest.mark.ledger("moe.balance")
@pytest.mark.parametrize("padded", [False, True])
def test_balance_loss_equals_transformers(padded: bool) -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    routing = route(build_randomized(Router(), 2, torch.float32), random(TOKENS, WIDTH).float())
    valid = torch.arange(TOKENS) % 5 != 1 if padded else None
    theirs = load_balancing_loss_func((routing.logits,), EXPERTS, 2, None if valid is None else valid.view(2, -1))
    assert torch.allclose(balance_loss(routing, valid), theirs, atol=1e-6)


@pytest.mark.ledger("moe.balance")
def test_losses_equal_switch_transformers() -> None:
    from transformers.models.switch_transformers import modeling_switch_transformers as switch

    routing = route(build_randomized(Router(), 1, torch.float32), random(TOKENS, WIDTH).float())
    theirs = switch.load_balancing_loss_func(routing.scores.unsqueeze(0), routing.chosen.view(1, -1))
    assert torch.allclose(balance_loss(routing, None), theirs, atol=1e-6)
    assert torch.allclose(z_loss(routing, None), switch.router_z_loss_func(routing.logits.unsqueeze(0)), atol=1e-5)


def routing_with(probabilities: Tensor, top_k: int) -> Routing:
    """A routing of about 1000 tokens in which the share of tokens that choose an expert is its probability."""
    experts = torch.repeat_interleave(torch.arange(len(probabilities)), (probabilities * 1000).round().long())
    chosen = torch.stack([experts.roll(shift) for shift in range(top_k)], -1)
    scores = probabilities.expand(len(experts), -1)
    return Routing(chosen, scores.gather(-1, chosen), scores, scores.log())


@pytest.mark.ledger("moe.balance")
def test_balance_loss_is_smallest_if_experts_are_used_equally() -> None:
    even = routing_with(torch.full((EXPERTS,), 1 / EXPERTS, dtype=torch.float64), 1)
    assert balance_loss(even, None).item() == pytest.approx(1.0)
    for seed in range(20):
        skewed = balance_loss(routing_with(random(EXPERTS, seed=seed).softmax(-1), 1), None)
        assert skewed > 1.05
    one_expert = balance_loss(routing_with(torch.eye(EXPERTS, dtype=torch.float64)[0], 1), None)
    assert one_expert.item() == EXPERTS  # the maximum: every token chooses the same expert


@pytest.mark.ledger("moe.balance")
@pytest.mark.parametrize("spec", [Router(), Router("sigmoid")], ids=["softmax", "sigmoid"])
def test_minimizing_the_balance_loss_balances_the_experts(spec: Router) -> None:
    module, x = build_randomized(spec, 2).train(), random(400, WIDTH) + 1

    def tokens_per_expert() -> Tensor:
        return torch.bincount(route(module, x).chosen.flatten(), minlength=EXPERTS)

    before = tokens_per_expert()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for _ in range(200):
        optimizer.zero_grad()
        balance_loss(route(module, x), None).backward()
        optimizer.step()
    assert before.max() > 2.5 * 100 and tokens_per_expert().max() < 1.6 * 100  # balanced experts have 100 each


def test_padding_adds_no_loss() -> None:
    module, x, valid = build_randomized(Router(), 2), random(TOKENS, WIDTH), torch.arange(TOKENS) % 3 != 0
    for loss in (balance_loss, z_loss):
        assert torch.allclose(loss(route(module, x), valid), loss(route(module, x[valid]), None), atol=1e-12)
        assert loss(route(module, x), torch.zeros_like(valid)).item() == 0


def kept_by_hand(chosen: list[list[int]], valid: list[bool], capacity: int) -> list[list[bool]]:
    used, kept = [0] * EXPERTS, [[False] * len(row) for row in chosen]
    for rank in range(len(chosen[0])):
        for token, row in enumerate(chosen):
            if valid[token] and used[row[rank]] < capacity:
                used[row[rank]] += 1
                kept[token][rank] = True
    return kept


@pytest.mark.ledger("moe.capacity")
@pytest.mark.parametrize("factor", [0.1, 0.5, 1.0, 1.25, 2.0])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_capacity_is_filled_by_rank_and_then_by_token(factor: float, padded: bool, top_k: int) -> None:
    chosen = route(build_randomized(Router(), top_k), random(TOKENS, WIDTH)).chosen
    valid = torch.arange(TOKENS) % 4 != 1 if padded else torch.ones(TOKENS, dtype=torch.bool)
    capacity = math.ceil(factor * top_k * int(valid.sum()) / EXPERTS)
    kept = within_capacity(chosen, valid if padded else None, EXPERTS, factor)
    assert kept.tolist() == kept_by_hand(chosen.tolist(), valid.tolist(), capacity)
    assert torch.bincount(chosen[kept], minlength=EXPERTS).max() <= capacity


@pytest.mark.ledger("moe.capacity")
@pytest.mark.parametrize("top_k", [1, 2, 3, 7])
def test_no_token_is_dropped_if_every_expert_has_capacity_for_all(top_k: int) -> None:
    chosen = torch.arange(top_k).expand(TOKENS, top_k)  # all tokens choose the same experts: the worst case
    assert within_capacity(chosen, None, EXPERTS, EXPERTS / top_k).all()
    assert not within_capacity(chosen, None, EXPERTS, 0.9 * EXPERTS / top_k).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Router(jitter=1.0), "jitter=1.0 must be in"),
        (lambda: Router(groups=0), "groups=0 must be positive"),
        (lambda: Router(groups=2, top_groups=3), "top_groups=3 is more than groups=2"),
        (lambda: Router(groups=3).check_sizes(8, 2), "8 experts cannot be split into groups=3"),
        (lambda: Router(groups=4).check_sizes(8, 3), "top_k=3 is more than the 2 experts of top_groups=1"),
        (lambda: Router("tanh"), "scores='tanh'"),
    ],
)
def test_invalid_specs_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make()
