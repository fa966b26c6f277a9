"""Both forms of latent attention equal plain loops and DeepSeek's modules; cache, FLOPs and adapters."""

import math
from dataclasses import replace

import pytest
import torch
import transformers
from torch import Tensor
from torch.autograd import gradcheck
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

from regard.adapt import LoRA, add_lora, merge_lora, unmerge_lora
from regard.engine.stores.contiguous import Contiguous
from regard.kernels.attention.mask import Full
from regard.kernels.attention.patterns.window import Window
from regard.layout import TokenLayout
from regard.parts.attention import Attention, use_backend
from regard.parts.latent_attention import LatentAttention, LatentAttentionModule
from regard.parts.norm import RMSNorm
from regard.parts.position.alibi import Alibi
from regard.parts.position.base import NoPosition
from regard.parts.position.rope import Rope
from regard.parts.position.rope_scaling import Yarn
from regard.spec import SpecError
from tests.laws import error
from tests.parts.attention_layer import bytes_of, random

WIDTH, LENGTH, EPS = 12, 7, 0.1
NORM = RMSNorm(EPS)
SPECS = {
    "default": LatentAttention(3, 8, 6, 4, norm=NORM),
    "query rank, value size, biases": LatentAttention(2, 7, 5, 2, 3, 9, norm=NORM, bias=True),
    "scale, half layout": LatentAttention(2, 8, 4, 4, position=Rope(50.0), norm=NORM, scale=0.9),
    "no positions, full": LatentAttention(2, 8, 4, 4, position=NoPosition(), mask=Full(), norm=NORM),
    "alibi, window": LatentAttention(4, 8, 4, 4, position=Alibi(), mask=Window(3), norm=NORM),
}
LAYOUTS = {
    "whole": TokenLayout.whole(2, LENGTH),
    "packed and padded": TokenLayout(
        torch.tensor([[0, 1, 2, 0, 1, 2, 3], list(range(LENGTH))]),
        torch.tensor([[0, 0, 0, 1, 1, 1, 1], [2] * LENGTH]),
        torch.tensor([[True] * LENGTH, [True] * 5 + [False] * 2]),
    ),
}
FORMS = {"expanded": False, "absorbed": True}


@pytest.fixture(params=FORMS)
def form(request, monkeypatch) -> str:
    monkeypatch.setattr(LatentAttention, "absorbs", lambda *_: FORMS[request.param])
    return request.param


def build(spec: LatentAttention, width: int = WIDTH) -> LatentAttentionModule:
    module = spec.build(width).double()
    for n, parameter in enumerate(module.parameters()):
        parameter.data = random(*parameter.shape, seed=n) * 0.5 + (parameter.dim() == 1)
    return module


def rotated(x: Tensor, position: int, rope: Rope) -> Tensor:
    out, d = x.clone(), len(x)
    for i in range(d // 2):
        a, b = (2 * i, 2 * i + 1) if rope.layout == "interleaved" else (i, i + d // 2)
        angle = position * rope.base ** (-2 * i / d)
        out[a] = x[a] * math.cos(angle) - x[b] * math.sin(angle)
        out[b] = x[b] * math.cos(angle) + x[a] * math.sin(angle)
    return out


def plain_loop(module: LatentAttentionModule, spec: LatentAttention, x: Tensor, layout: TokenLayout) -> Tensor:
    """The expanded form, with one query at a time."""
    weight = module.state_dict()
    scale = (spec.nope_dim + spec.rope_dim) ** -0.5 if spec.scale is None else spec.scale

    def project(name: str, x: Tensor) -> Tensor:
        return x @ weight[f"{name}.weight"].T + weight.get(f"{name}.bias", 0)

    def latent(name: str, x: Tensor) -> Tensor:
        y = project(f"{name}_proj", x)
        return y / (y.square().mean(-1, keepdim=True) + EPS).sqrt() * weight[f"{name}_norm.weight"]

    def rotate(x: Tensor, b: int, i: int) -> Tensor:
        return rotated(x, int(layout.positions[b, i]), spec.position) if isinstance(spec.position, Rope) else x

    def score(b: int, i: int, j: int, h: int) -> float:
        distance = int(layout.positions[b, i] - layout.positions[b, j])
        bias = -(2 ** (-8 * (h + 1) / spec.heads)) * abs(distance) if spec.position == Alibi() else 0.0
        key = torch.cat([weight["k_up"][h] @ c[b, j], rotate(k_rope[b, j], b, j)])
        query = torch.cat([q[b, i, h, : spec.nope_dim], rotate(q[b, i, h, spec.nope_dim :], b, i)])
        return float(query @ key) * scale + bias

    def allows(b: int, i: int, j: int) -> bool:
        distance = int(layout.positions[b, i] - layout.positions[b, j])
        in_window = spec.mask == Full() or 0 <= distance < (spec.mask.size if isinstance(spec.mask, Window) else LENGTH)
        same_document = layout.segments is None or layout.segments[b, i] == layout.segments[b, j]
        return bool(in_window and same_document and (layout.valid is None or layout.valid[b, j]))

    q = project("q_proj", latent("q_latent", x) if spec.query_rank else x).unflatten(-1, (spec.heads, -1))
    c, k_rope = latent("latent", x), project("k_rope_proj", x)
    z = torch.zeros(*x.shape[:2], spec.heads, spec.value_dim, dtype=x.dtype)
    for b, i, h in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        allowed = [j for j in range(x.shape[1]) if allows(b, i, j)]
        weights = [math.exp(score(b, i, j, h)) for j in allowed]
        for w, j in zip(weights, allowed, strict=True):
            z[b, i, h] += w / sum(weights) * (weight["v_up"][h] @ c[b, j])
    return project("o_proj", z.flatten(-2))


@pytest.mark.parametrize("layout_name", LAYOUTS)
@pytest.mark.parametrize("name", SPECS)
def test_equals_the_equation_in_plain_loops(name: str, layout_name: str, form: str) -> None:
    spec, x, layout = SPECS[name], random(2, LENGTH, WIDTH, seed=99), LAYOUTS[layout_name]
    module = build(spec)
    valid = torch.ones(2, LENGTH, dtype=torch.bool) if layout.valid is None else layout.valid
    found = module(x, layout)
    assert found.shape == x.shape
    assert (found - plain_loop(module, spec, x, layout))[valid].abs().max() < 1e-12


@pytest.mark.parametrize("name", SPECS)
def test_gradients_equal_finite_differences(name: str, form: str) -> None:
    module, x = build(SPECS[name]), random(2, LENGTH, WIDTH, seed=99).requires_grad_()
    parameters = dict(module.named_parameters())

    def as_function(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(parameters, values, strict=True)), (x, LAYOUTS["whole"]))

    assert gradcheck(as_function, (x, *parameters.values()), fast_mode=True)


def test_the_form_with_fewer_products_is_used() -> None:
    deepseek = LatentAttention(128, 512, 128, 64, 128, 1536)  # V2 and V3
    assert deepseek.absorbs(1, 1000) and deepseek.absorbs(100, 10**6)
    assert not deepseek.absorbs(4096, 4096) and not deepseek.absorbs(1000, 2000)
    for tokens in (1, 50, 400, 1000):
        products = deepseek.products(tokens, 1000)
        used_form = "absorbed" if deepseek.absorbs(tokens, 1000) else "expanded"
        assert products[used_form] == min(products.values())


def test_a_decoding_step_attends_to_the_latents() -> None:
    """The keys and values of a decoding step are the cached latents, one head for all query heads."""
    spec = SPECS["query rank, value size, biases"]
    module, x = build(spec), random(1, LENGTH, WIDTH)
    shapes: dict[str, tuple] = {}
    attend = module.attend

    def record_shapes(q: Tensor, k: Tensor, v: Tensor, *arguments: object) -> Tensor:
        shapes.update(k=tuple(k.shape), v=tuple(v.shape))
        return attend(q, k, v, *arguments)

    module.attend = record_shapes
    whole = module(x, TokenLayout.whole(1, LENGTH))
    assert shapes == {"k": (1, 2, LENGTH, 5 + 2), "v": (1, 2, LENGTH, 3)}
    store = Contiguous(((spec.memory(WIDTH),),), 1, 16, torch.float64)
    for t in range(LENGTH):
        step = module(x[:, t : t + 1], layout := TokenLayout(torch.tensor([[t]])), store.begin_forward(layout)[0][0])
        assert shapes == {"k": (1, 1, 16, 7 + 2), "v": (1, 1, 16, 7)}
        assert (step - whole[:, t : t + 1]).abs().max() < 1e-12


def test_the_cache_holds_a_latent_and_a_rotated_key() -> None:
    """DeepSeek-V2 caches 576 numbers per token and layer: as many as 2.25 key heads; multi-head caches 32768."""
    deepseek = LatentAttention(128, 512, 128, 64, 128, 1536)
    latent, one_key_head, multi_head = (
        bytes_of(Contiguous(((spec.memory(5120),),), 1, 7, torch.float16)) / 2 / 8  # a capacity of 7 has 8 slots
        for spec in (deepseek, Attention(128, 1, 128), Attention(128, 128, 128))
    )
    assert latent == 512 + 64 == 2.25 * one_key_head
    assert multi_head == 32768


@pytest.mark.parametrize("tokens", [1, 5, 20])
@pytest.mark.parametrize("name", ["default", "query rank, value size, biases"])
def test_flops_equal_the_counted_flops(name: str, tokens: int) -> None:
    spec = SPECS[name]
    module, store = build(spec), Contiguous(((spec.memory(WIDTH),),), 1, 20, torch.float64)
    use_backend(module, "reference")
    with FlopCounterMode(display=False) as counter:
        module(
            random(1, tokens, WIDTH),
            layout := TokenLayout(torch.arange(tokens).unsqueeze(0)),
            store.begin_forward(layout)[0][0],
        )
    assert counter.get_total_flops() == spec.flops(WIDTH, tokens, 20)


def test_both_forms_use_the_adapters_of_the_up_projections(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = SPECS["default"].build(WIDTH).double(), random(1, 6, WIDTH)
    without_adapters = module(x, TokenLayout.whole(1, 6))
    assert add_lora(module, LoRA(targets=("q_proj", "k_up", "v_up"))) == ["k_up", "v_up", "q_proj"]
    assert error(module(x, TokenLayout.whole(1, 6)), without_adapters) == 0
    for name, parameter in module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    outputs = []
    for absorbs in (True, False):
        monkeypatch.setattr(LatentAttention, "absorbs", lambda *_, absorbs=absorbs: absorbs)
        outputs.append(module(x, TokenLayout.whole(1, 6)))
    assert error(*outputs) < 1e-12 and error(outputs[0], without_adapters) > 1e-2
    layers = merge_lora(module)
    assert error(module(x, TokenLayout.whole(1, 6)), outputs[0]) < 1e-12
    unmerge_lora(module, layers)
    assert error(module(x, TokenLayout.whole(1, 6)), outputs[1]) == 0


@pytest.mark.parametrize("field", ["heads", "rank", "nope_dim", "rope_dim", "v_dim", "query_rank"])
def test_sizes_must_be_positive(field: str) -> None:
    with pytest.raises(SpecError, match=f"{field}=0 must be positive"):
        LatentAttention(**{"heads": 2, "rank": 4, "nope_dim": 4, "rope_dim": 2, field: 0})


HF = {
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 1,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "q_lora_rank": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "attn_implementation": "eager",
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}
ROPE = Rope(100.0, layout="interleaved")
YARN_ROPE = Rope(100.0, layout="interleaved", scaling=Yarn(4.0, 8, mscale=0.7, mscale_all_dim=0.9))
YARN_SCALE = (1 + 0.09 * math.log(4)) ** 2  # DeepSeek's YaRN sharpens all scores, not only those of the rotated part
WITH_QUERY_RANK = LatentAttention(4, 10, 6, 4, 5, 12, ROPE)
YARN_SPEC = LatentAttention(4, 10, 6, 4, 5, 12, YARN_ROPE, scale=YARN_SCALE * 10**-0.5)
PEERS = {
    "v2": (v2, "V2", {}, WITH_QUERY_RANK),
    "v2, no query rank": (v2, "V2", {"q_lora_rank": None}, replace(WITH_QUERY_RANK, query_rank=None)),
    "v2, yarn": (v2, "V2", {"rope_parameters": YARN}, YARN_SPEC),
    "v3, biases": (v3, "V3", {"attention_bias": True}, replace(WITH_QUERY_RANK, bias=True)),
    "v3, half layout": (v3, "V3", {"rope_interleave": False}, replace(WITH_QUERY_RANK, position=Rope(100.0))),
    "v3, yarn": (v3, "V3", {"rope_parameters": YARN}, YARN_SPEC),
}


def to_our_names(weights: dict[str, Tensor], spec: LatentAttention) -> dict[str, Tensor]:
    """Renames DeepSeek's weights to our names, and splits its fused matrices."""
    names = {"q_a_proj": "q_latent_proj", "q_a_layernorm": "q_latent_norm", "q_b_proj": "q_proj",
             "kv_a_layernorm": "latent_norm"}  # fmt: skip
    out = {}
    for name, value in weights.items():
        layer, _, kind = name.rpartition(".")
        if layer == "kv_a_proj_with_mqa":
            out[f"latent_proj.{kind}"], out[f"k_rope_proj.{kind}"] = value.split([spec.rank, spec.rope_dim])
        elif layer == "kv_b_proj":
            heads = value.unflatten(0, (spec.heads, -1))
            out["k_up"], out["v_up"] = heads.split([spec.nope_dim, spec.value_dim], 1)
        else:
            out[f"{names.get(layer, layer)}.{kind}"] = value
    return out


@pytest.mark.parametrize("name", PEERS)
def test_equals_the_modules_of_transformers(name: str, form: str) -> None:
    """With the same weights: outputs, and gradients with respect to the input and to the weights, in float32."""
    package, version, fields, spec = PEERS[name]
    config = getattr(transformers, f"Deepseek{version}Config")(**HF | fields)
    theirs = getattr(package, f"Deepseek{version}Attention")(config, 0)
    for n, parameter in enumerate(theirs.parameters()):
        parameter.data = random(*parameter.shape, seed=n).float() * 0.4 + (parameter.dim() == 1)
    ours = spec.build(24)
    ours.load_state_dict(to_our_names(theirs.state_dict(), spec))
    x = random(2, 11, 24, seed=50).float().requires_grad_()
    mask = torch.full((11, 11), float("-inf")).triu(1)[None, None]
    rotation = getattr(package, f"Deepseek{version}RotaryEmbedding")(config)(x, torch.arange(11).unsqueeze(0))
    expected = theirs(x, position_embeddings=rotation, attention_mask=mask)[0]
    found = ours(x, TokenLayout.whole(2, 11))
    expected.sin().sum().backward()
    expected_gradient, x.grad = x.grad, None
    found.sin().sum().backward()
    pairs = [(found, expected), (x.grad, expected_gradient)]
    gradients = to_our_names({name: p.grad for name, p in theirs.named_parameters()}, spec)
    pairs += [(parameter.grad, gradients[name]) for name, parameter in ours.named_parameters()]
    for f, e in pairs:
        assert (f - e).abs().max() <= 1e-5 * e.abs().max().clamp_min(1)
