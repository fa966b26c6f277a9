"""Every option of the attention layer equals plain loops and other libraries, with correct gradients."""

import math
from dataclasses import replace

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.autograd import gradcheck
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.llama import modeling_llama as llama
from transformers.models.olmo2 import modeling_olmo2 as olmo2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from regard.kernels.attention.mask import Causal, Full
from regard.layout import TokenLayout
from regard.parts.attention import Attention, AttentionModule, use_backend
from regard.parts.norm import LayerNorm, RMSNorm
from regard.parts.position.rope import Rope
from regard.parts.position.rope_scaling import Yarn
from regard.spec import SpecError
from tests.parts.attention_layer import random, record

WIDTH, LENGTH, EPS = 12, 6, 0.1
OPTIONS = {
    "default": Attention(3),
    "grouped, biases": Attention(4, 2, bias=True),
    "multi-query, explicit head_dim, output bias": Attention(4, 1, head_dim=5, out_bias=True),
    "biases, except of keys": Attention(3, bias=True, key_bias=False),
    "full": Attention(3, mask=Full()),
    "qk-norm per head": Attention(4, 2, qk_norm=RMSNorm(EPS)),
    "qk-norm over all heads": Attention(4, 2, qk_norm=RMSNorm(EPS), norm_over="all"),
    "qk-norm, layernorm": Attention(4, 2, qk_norm=LayerNorm(EPS), norm_over="all"),
    "clip": Attention(3, bias=True, clip=0.8),
    "clip after qk-norm": Attention(4, 2, qk_norm=RMSNorm(EPS), norm_over="all", clip=0.8),
    "scale": Attention(3, scale=0.9),
    "softcap": Attention(3, softcap=0.7, scale=2.0),
    "learned sinks": Attention(4, 2, sinks=True),
    "gate per head": Attention(4, 2, gate="head"),
    "gate per coordinate": Attention(4, 2, gate="element"),
    "all options": Attention(
        4, 2, 4, mask=Full(), bias=True, qk_norm=RMSNorm(EPS), scale=1.5, softcap=0.8, sinks=True, gate="element"
    ),
}
DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1, 1], [2] * LENGTH])
LAYOUTS = {
    "whole": TokenLayout.whole(2, LENGTH),
    "packed and padded": TokenLayout(
        torch.tensor([[0, 1, 0, 1, 2, 3], list(range(LENGTH))]),
        DOCUMENTS,
        torch.tensor([[True] * LENGTH, [True] * 4 + [False] * 2]),
    ),
}


def build(spec: Attention) -> AttentionModule:
    module = spec.build(WIDTH).double()
    for n, parameter in enumerate(module.parameters()):
        parameter.data = random(*parameter.shape, seed=n) * 0.5 + (parameter.dim() == 1)
    return module


def plain_loop(module: AttentionModule, spec: Attention, x: Tensor, layout: TokenLayout) -> Tensor:
    """The equation for one query and one head at a time, computed from the weights alone."""
    heads, kv_heads, dim = spec.sizes(WIDTH)
    scale = dim**-0.5 if spec.scale is None else spec.scale
    weight = module.state_dict()

    def project(name: str, x: Tensor, heads: int) -> Tensor:
        y = x @ weight[f"{name}_proj.weight"].T + weight.get(f"{name}_proj.bias", 0)
        return y.view(*x.shape[:-1], heads, -1)

    def norm(name: str, x: Tensor) -> Tensor:
        if spec.qk_norm is None:
            return x
        y = x.flatten(-2) if spec.norm_over == "all" else x
        layer = isinstance(spec.qk_norm, LayerNorm)
        y = y - y.mean(-1, keepdim=True) if layer else y
        y = y / (y.square().mean(-1, keepdim=True) + EPS).sqrt() * weight[f"{name}_norm.norm.weight"]
        return (y + weight[f"{name}_norm.norm.bias"] if layer else y).view_as(x)

    def allows(b: int, i: int, j: int) -> bool:
        causal = spec.mask == Full() or layout.positions[b, j] <= layout.positions[b, i]
        same = layout.segments is None or layout.segments[b, i] == layout.segments[b, j]
        return bool(causal and same and (layout.valid is None or layout.valid[b, j]))

    q, k, v = norm("q", project("q", x, heads)), norm("k", project("k", x, kv_heads)), project("v", x, kv_heads)
    if spec.clip is not None:
        q, k, v = (y.minimum(y.new_tensor(spec.clip)).maximum(y.new_tensor(-spec.clip)) for y in (q, k, v))
    z = torch.zeros(*x.shape[:2], heads, dim, dtype=x.dtype)
    for b in range(len(x)):
        for i in range(x.shape[1]):
            for h in range(heads):
                g, allowed = h * kv_heads // heads, [j for j in range(x.shape[1]) if allows(b, i, j)]
                scores = [float(q[b, i, h] @ k[b, j, g]) * scale for j in allowed]
                if spec.softcap is not None:
                    scores = [spec.softcap * math.tanh(s / spec.softcap) for s in scores]
                total = sum(map(math.exp, scores)) + (math.exp(weight["sinks"][h]) if spec.sinks else 0)
                for s, j in zip(scores, allowed, strict=True):
                    z[b, i, h] += math.exp(s) / total * v[b, j, g]
    if spec.gate != "none":
        z = z * (x @ weight["gate.proj.weight"].T).sigmoid().view(*x.shape[:2], heads, -1)
    return z.flatten(-2) @ weight["o_proj.weight"].T + weight.get("o_proj.bias", 0)


@pytest.mark.parametrize("layout_name", LAYOUTS)
@pytest.mark.parametrize("name", OPTIONS)
def test_equals_the_equation_in_plain_loops(name: str, layout_name: str) -> None:
    spec, x, layout = OPTIONS[name], random(2, LENGTH, WIDTH, seed=99), LAYOUTS[layout_name]
    module = build(spec)
    found, expected = module(x, layout), plain_loop(module, spec, x, layout)
    assert found.shape == x.shape
    assert (found - expected).abs().max() < 1e-12
    use_backend(module, "reference")
    assert (module(x, layout) - expected).abs().max() < 1e-12


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_equal_finite_differences(name: str) -> None:
    module, x = build(OPTIONS[name]), random(2, LENGTH, WIDTH, seed=99).requires_grad_()
    parameters = dict(module.named_parameters())

    def as_function(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(
            module, dict(zip(parameters, values, strict=True)), (x, LAYOUTS["packed and padded"])
        )

    assert gradcheck(as_function, (x, *parameters.values()), fast_mode=True)


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_changes_the_output(name: str) -> None:
    """With the same weights, the output without the option differs."""
    spec, x, layout = OPTIONS[name], random(2, LENGTH, WIDTH, seed=99), LAYOUTS["whole"]
    disabled = {"mask": None, "qk_norm": None, "clip": None, "scale": None, "softcap": None}
    disabled |= {"sinks": False, "gate": "none"}
    module = build(spec)
    for field, value in disabled.items():
        if getattr(spec, field) != value:
            without_option = replace(spec, **{field: value}).build(WIDTH).double()
            without_option.load_state_dict(module.state_dict(), strict=False)
            assert (without_option(x, layout) - module(x, layout)).abs().max() > 1e-3, field


def test_dropout_acts_on_weights_in_training_only() -> None:
    spec, x = Attention(2, dropout=0.5), torch.ones(1, 400, WIDTH, dtype=torch.float64)
    module, layout = build(spec), TokenLayout.whole(1, 400)
    exact = build(replace(spec, dropout=0.0))(x, layout)
    assert torch.equal(module.eval()(x, layout), exact)
    dropped = module.train()(x, layout)
    assert not torch.equal(dropped, module(x, layout))
    late_queries = slice(200, None)  # averages over many keys, so dropout changes them little
    assert 0.01 < (dropped - exact)[:, late_queries].abs().max() / exact.abs().max() < 0.5
    assert (dropped - exact)[:, late_queries].mean(1).abs().max() < 0.02 * exact.abs().max()


def test_a_sink_takes_weight_from_all_keys_and_adds_no_value() -> None:
    """Rows sum to Σ exp(s) / (Σ exp(s) + exp(sink)): a sink of -∞ has no effect, with +∞ the output is zero."""
    module, x, layout = build(OPTIONS["learned sinks"]), random(1, LENGTH, WIDTH), TokenLayout.whole(1, LENGTH)
    without_sinks = build(replace(OPTIONS["learned sinks"], sinks=False))
    without_sinks.load_state_dict(module.state_dict(), strict=False)
    module.sinks.data.fill_(-1e9)
    assert (module(x, layout) - without_sinks(x, layout)).abs().max() < 1e-12
    module.sinks.data.fill_(1e9)
    assert module(x, layout).abs().max() == 0


def test_capped_scores_bound_every_weight_from_below() -> None:
    """For queries of any norm, no weight is below exp(-c) / (exp(-c) + (n - 1) exp(c))."""
    module, x = build(Attention(3, softcap=0.5, mask=Full())), 1e3 * random(1, LENGTH, WIDTH)
    lower_bound = math.exp(-0.5) / (math.exp(-0.5) + (LENGTH - 1) * math.exp(0.5))
    assert record(module, x)["weights"].min() >= lower_bound - 1e-12
    assert record(build(Attention(3, mask=Full())), x)["weights"].min() < 1e-12


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("heads", 0, "heads=0 must be positive"),
        ("kv_heads", 3, "choose one of 1, 2, 4"),
        ("head_dim", -1, "head_dim=-1 must be positive"),
        ("clip", 0.0, "clip=0.0 must be positive"),
        ("softcap", 0.0, "softcap=0.0 must be positive"),
        ("dropout", 1.0, r"dropout=1.0 must be in \[0, 1\)"),
        ("gate", "sometimes", "Attention.gate='sometimes'"),
        ("norm_over", "token", "Attention.norm_over='token'"),
    ],
)
def test_invalid_specs_are_refused(field: str, value: object, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Attention(**{"heads": 4, field: value})


HF = {
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 1,
    "attn_implementation": "eager",
}
ROPE = {"rope_type": "default", "rope_theta": 100.0}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 8}
PEERS = {
    "llama": (
        llama.LlamaAttention,
        llama.LlamaRotaryEmbedding,
        transformers.LlamaConfig(**HF, rope_parameters=ROPE, attention_bias=True),
        Attention(4, 2, 8, Rope(100.0), bias=True),
    ),
    "qwen3": (
        qwen3.Qwen3Attention,
        qwen3.Qwen3RotaryEmbedding,
        transformers.Qwen3Config(**HF, rope_parameters=ROPE, rms_norm_eps=1e-3),
        Attention(4, 2, 8, Rope(100.0), qk_norm=RMSNorm(1e-3)),
    ),
    "olmo2": (
        olmo2.Olmo2Attention,
        olmo2.Olmo2RotaryEmbedding,
        transformers.Olmo2Config(**HF, rope_parameters=ROPE, rms_norm_eps=1e-3),
        Attention(4, 2, 8, Rope(100.0), qk_norm=RMSNorm(1e-3), norm_over="all"),
    ),
    "gemma2": (
        gemma2.Gemma2Attention,
        gemma2.Gemma2RotaryEmbedding,
        transformers.Gemma2Config(
            **HF,
            rope_parameters=ROPE,
            attn_logit_softcapping=0.8,
            query_pre_attn_scalar=3,
            layer_types=["full_attention"],
        ),
        Attention(4, 2, 8, Rope(100.0), scale=3**-0.5, softcap=0.8),
    ),
    "gpt-oss": (
        gpt_oss.GptOssAttention,
        gpt_oss.GptOssRotaryEmbedding,
        transformers.GptOssConfig(**HF, rope_parameters=YARN, layer_types=["full_attention"], attention_bias=True),
        Attention(4, 2, 8, Rope(100.0, scaling=Yarn(4.0, 8)), bias=True, sinks=True),
    ),
}


@pytest.mark.parametrize("name", PEERS)
def test_equals_the_modules_of_transformers(name: str) -> None:
    """Outputs and gradients with the same weights, in float32."""
    theirs_class, rotary_class, config, spec = PEERS[name]
    theirs, rotary = theirs_class(config, 0), rotary_class(config)
    for n, parameter in enumerate(theirs.parameters()):
        parameter.data = random(*parameter.shape, seed=n).float() * 0.4 + (parameter.dim() == 1)
    ours = spec.build(24)
    weights = {name.replace("_norm.", "_norm.norm."): value for name, value in theirs.state_dict().items()}
    ours.load_state_dict(weights)
    x = random(2, 11, 24, seed=50).float().requires_grad_()
    mask = torch.full((11, 11), float("-inf")).triu(1)[None, None]
    rotation = rotary(x, torch.arange(11).unsqueeze(0))
    expected = theirs(x, position_embeddings=rotation, attention_mask=mask)[0]
    found = ours(x, TokenLayout.whole(2, 11))
    parameters = [(dict(ours.named_parameters())[name.replace("_norm.", "_norm.norm.")], p)
                  for name, p in theirs.named_parameters()]  # fmt: skip
    gradients = torch.autograd.grad(found.sin().sum(), [x, *(ours for ours, _ in parameters)])
    expected_gradients = torch.autograd.grad(expected.sin().sum(), [x, *(theirs for _, theirs in parameters)])
    for f, e in zip((found, *gradients), (expected, *expected_gradients), strict=True):
        assert (f - e).abs().max() <= 1e-5 * e.abs().max().clamp_min(1)


@pytest.mark.parametrize("full", [False, True], ids=["causal", "full"])
def test_equals_the_module_of_torch_with_padding(full: bool) -> None:
    spec = Attention(3, bias=True, mask=Full() if full else Causal())
    ours, theirs = build(spec), nn.MultiheadAttention(WIDTH, 3, batch_first=True, dtype=torch.float64)
    projections = [ours.q_proj, ours.k_proj, ours.v_proj]
    theirs.in_proj_weight.data = torch.cat([p.weight for p in projections])
    theirs.in_proj_bias.data = torch.cat([p.bias for p in projections])
    theirs.out_proj.load_state_dict(ours.o_proj.state_dict())
    x, valid = random(2, LENGTH, WIDTH), torch.tensor([[True] * LENGTH, [True] * 4 + [False] * 2])
    mask = None if full else ~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    expected, _ = theirs(x, x, x, attn_mask=mask, key_padding_mask=~valid, need_weights=False)
    found = ours(x, TokenLayout(torch.arange(LENGTH).expand(2, LENGTH), valid=valid))
    assert (found - expected).abs().max() < 1e-12
