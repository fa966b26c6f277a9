"""Scaling laws: optima are minima, serving favours smaller models, training takes 6 FLOPs per weight and token."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from regard.parts.attention import use_backend
from regard.parts.feedforward import SwiGLU
from regard.planning import plan
from regard.planning.flops import flops_by_part
from regard.planning.published import PUBLISHED, llama, rotary
from regard.planning.scaling import BESIROGLU, HOFFMANN, ScalingLaw, flops_6nd, lifetime_flops


@pytest.mark.ledger("calc.scaling")
@pytest.mark.parametrize("compute", [1e18, 1e21, 5.76e23])
def test_the_optimum_is_a_minimum(compute):
    parameters, tokens = BESIROGLU.optimum(compute)
    assert flops_6nd(parameters, tokens) == pytest.approx(compute)
    best = BESIROGLU.loss(parameters, tokens)
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert BESIROGLU.loss(parameters * factor, tokens / factor) > best


def test_optimal_size_and_data_grow_at_the_same_rate():
    parameters, tokens = BESIROGLU.optimum(5.76e23)  # the compute of the 70B model of Hoffmann et al.
    assert parameters == pytest.approx(70e9, rel=0.1) and tokens == pytest.approx(1.4e12, rel=0.1)
    larger = BESIROGLU.optimum(100 * 5.76e23)
    assert all(8 < later / earlier < 12 for earlier, later in zip((parameters, tokens), larger, strict=True))


def cheapest(law: ScalingLaw, loss: float, served: float) -> float:
    """The size of least FLOPs for training to this loss and serving so many tokens."""
    sizes = [10 ** (9 + step / 100) for step in range(300)]
    sufficient = [n for n in sizes if loss - law.floor > law.size / n**law.size_exponent]
    return min(sufficient, key=lambda n: lifetime_flops(law, loss, n, served))


@pytest.mark.ledger("scale.modern", exact=True)
@pytest.mark.parametrize("law", [HOFFMANN, BESIROGLU])
@pytest.mark.parametrize("compute", [1e22, 1e23])
def test_served_tokens_make_a_smaller_model_trained_beyond_the_optimum_cheapest(law: ScalingLaw, compute: float):
    parameters, tokens = law.optimum(compute)
    loss = law.loss(parameters, tokens)
    assert cheapest(law, loss, 0) == pytest.approx(parameters, rel=0.03)  # the optimum itself
    sizes = [cheapest(law, loss, served) for served in (0, tokens, 10 * tokens, 100 * tokens)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 1.15 * sizes[1] and sizes[1] > 1.3 * sizes[2]
    ratios = [law.tokens_for(loss, size) / size for size in sizes]
    assert ratios == sorted(ratios) and ratios[2] > 5 * ratios[0]  # tokens per weight, far beyond the optimum
    whole = [lifetime_flops(law, loss, size, 10 * tokens) for size in (sizes[0], sizes[2])]
    assert whole[1] < 0.9 * whole[0]  # training and serving in all, though training alone takes more
    assert lifetime_flops(law, loss, sizes[2], 0) > 1.05 * lifetime_flops(law, loss, sizes[0], 0)
    with pytest.raises(ValueError, match="never reach"):
        law.tokens_for(loss, 1e6)


@pytest.mark.ledger("scale.gpt3", "fam.gpt")
def test_gpt3_has_fewer_and_llama_more_tokens_per_parameter_than_optimal():
    def tokens_per_parameter(name: str) -> float:
        return PUBLISHED[name].tokens / plan(PUBLISHED[name].spec()).parameters

    assert plan(PUBLISHED["gpt3"].spec()).parameters == 174_604_259_328
    assert tokens_per_parameter("gpt3") == pytest.approx(1.7, abs=0.05)
    parameters, tokens = BESIROGLU.optimum(flops_6nd(175e9, 300e9))
    assert 15 < tokens / parameters < 25
    assert tokens_per_parameter("llama-3.1-8b") > 1000


@pytest.mark.ledger("scale.flops")
def test_a_training_step_takes_six_flops_per_weight_and_token():
    spec, tokens = llama(2, 128, rotary(4), SwiGLU(384), vocab=64, context=32), 32
    model = spec.build(seed=0)
    use_backend(model, "reference")
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, tokens, dtype=torch.long)).sum().backward()
    planned = plan(spec)
    products = planned.parameters - planned.count.parts["embedding"] - planned.count.parts["norm"]
    pairs = flops_by_part(spec, tokens, tokens)["attention, pairs"]
    assert counter.get_total_flops() == flops_6nd(products, tokens) + 3 * pairs
    assert counter.get_total_flops() == pytest.approx(flops_6nd(planned.parameters, tokens), rel=0.05)
