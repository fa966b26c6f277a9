"""Published models by name: exact counts of weights and bytes, and the figures that follow from them."""

import dataclasses

import pytest
import torch
from torch import nn

from regard.formats.base import NumberFormat
from regard.formats.gguf_blocks import GGUFBlocks
from regard.formats.gguf_layouts import LAYOUTS
from regard.formats.integers import Integer
from regard.formats.nf4 import NF4
from regard.models.base import meta_device
from regard.models.decoder import Decoder
from regard.models.presets import vit
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import FeedForward, SwiGLU, eight_thirds
from regard.parts.norm import LayerNorm, RMSNorm
from regard.parts.position.learned import Learned
from regard.parts.router import Router
from regard.planning import groups, plan, rows
from regard.planning.flops import attention_equals_rest
from regard.planning.memory import (
    cached_tokens_that_fit,
    format_of,
    sequences_to_exceed_weights,
    tokens_to_match_weights,
)
from regard.planning.parameters import relative_to_dense, shared_and_expert_params
from regard.planning.published import PUBLISHED, block_weights, depth_for, scaled_llama
from regard.planning.speed import DEVICES, Device

SEVENTY_BILLION = 70 * 10**9
KV_BYTES = 327_680  # per cached token: 80 layers, 8 heads of 128, 16 bits


def parameters_of(body, width: int) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in body.build(width).parameters())


def published(name: str, **changes):
    return dataclasses.replace(PUBLISHED[name].spec(), **changes)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_model_can_be_planned(name):
    spec = published(name)
    planned = plan(spec, context=512, dtype="bfloat16")
    with meta_device():
        assert planned.parameters == sum(parameter.numel() for parameter in spec.build().parameters())
    assert all(isinstance(cell, str) for row in rows(groups(planned)) for cell in row)


@pytest.mark.ledger("fam.others")
def test_palm_has_the_published_number_of_parameters_and_one_key_head():
    planned = plan(published("palm-540b"))
    parameters = planned.to_dict()["parameters"]
    assert round((parameters["total"] - parameters["norm"]) / 1e9, 2) == 540.35  # table 1 of the paper, of the matrices
    assert planned.attention_shapes == {(48, 1, 256): 118}


@pytest.mark.ledger("ffn.params", "norm.rms")
def test_parameters_of_feedforwards_and_norms_equal_their_formulas():
    assert parameters_of(FeedForward(2048, bias=False), 512) == 2_097_152 == 2 * parameters_of(Attention(8), 512)
    assert parameters_of(FeedForward(2048), 512) == 2_099_712
    assert parameters_of(SwiGLU(2048), 512) == 3 * 512 * 2048
    assert (parameters_of(LayerNorm(), 512), parameters_of(RMSNorm(), 512)) == (1024, 512)


@pytest.mark.ledger("model.llama7b", "ffn.share", "calc.params")
def test_llama_7b_has_the_published_number_of_parameters():
    planned = plan(published("llama-7b"))
    assert planned.parameters == 6_738_415_616
    assert plan(published("llama-7b", tied=True)).parameters == 6_607_343_616
    parts = planned.count.parts
    assert parts == {
        "embedding": 32000 * 4096,
        "attention": 32 * 4 * 4096**2,
        "swiglu": 32 * 3 * 4096 * 11008,
        "norm": (2 * 32 + 1) * 4096,
        "head": 32000 * 4096,
    }
    assert round(parts["swiglu"] / 1e9, 2) == 4.33 and round(parts["attention"] / 1e9, 2) == 2.15
    share = {name: round(100 * number / planned.parameters, 1) for name, number in parts.items()}
    assert (share["swiglu"], share["attention"]) == (64.2, 31.9)


@pytest.mark.ledger("model.llama7b")
def test_llama_7b_has_the_parameters_of_transformers():
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        theirs = LlamaForCausalLM(LlamaConfig())  # the defaults are those of the 7B model
    assert sum(parameter.numel() for parameter in theirs.parameters()) == 6_738_415_616


@pytest.mark.ledger("ffn.share")
def test_a_feedforward_of_four_times_the_width_is_two_thirds_of_a_block():
    attention, feedforward = parameters_of(Attention(8), 512), parameters_of(FeedForward(2048, bias=False), 512)
    assert feedforward / (attention + feedforward) == pytest.approx(2 / 3)
    assert feedforward / (2 * attention + feedforward) == 0.5  # with cross-attention as well
    assert plan(published("gpt2")).count.parts["embedding"] > 0.3 * plan(published("gpt2")).parameters


@pytest.mark.ledger("model.gptlite")
def test_gpt_lite_has_3_546_624_parameters_and_learns():
    norm = LayerNorm()
    block = Block((Sublayer(Attention(8, bias=True), norm), Sublayer(FeedForward(1024), norm)))
    spec = Decoder(1000, 256, (Repeat((block,), 4),), position=Learned(512), norm=norm)
    assert plan(spec).parameters == 3_546_624
    model, ids = spec.build(seed=0), torch.randint(1000, (2, 64), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss() -> torch.Tensor:
        logits = model(ids[:, :-1])
        assert logits.shape == (2, 63, 1000)
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    first = loss()
    first.backward()
    optimizer.step()
    assert loss() < first


@pytest.mark.ledger("mha.headdim")
def test_published_models_have_head_dims_of_64_or_128():
    attentions = {name: plan(published(name)).attention_shapes for name in ("gpt2", "gpt3", "llama-7b", "llama-2-70b")}
    assert [next(iter(found)) for found in attentions.values()] == [
        (12, 12, 64),
        (96, 96, 128),
        (32, 32, 128),
        (64, 8, 128),
    ]
    numbers = groups(plan(published("llama-2-70b")))
    assert numbers["attention_64x128_kv_8"] == {"layers": 80, "head_dim": 128}


@pytest.mark.ledger("blk.dials", "ffn.parity")
def test_depth_determines_a_scaled_llama():
    assert block_weights(32) == 12 * 32 * 4096**2 == 6_442_450_944
    assert scaled_llama(32) == published("llama-7b") and depth_for(6.7e9) == 32
    assert eight_thirds(4096) == 11008 and 3 * 4096 * (8 / 3 * 4096) == 8 * 4096**2
    gated, ungated = SwiGLU(3072), FeedForward(4608, bias=False)  # 8/3 of 1152 without rounding, and 4 times 1152
    assert parameters_of(gated, 1152) == parameters_of(ungated, 1152)
    sizes = [plan(scaled_llama(depth)).parameters for depth in (6, 12, 24, 48)]
    assert all(6 < larger / smaller < 9 for smaller, larger in zip(sizes[1:], sizes[2:], strict=False))
    with pytest.raises(ValueError, match="depth=0"):
        scaled_llama(0)


@pytest.mark.ledger("kv.70b", "kv.formula", "kv.heads", "calc.kv")
def test_a_70b_model_caches_327_680_bytes_per_token():
    planned = plan(published("llama-2-70b"), context=4096, dtype="float16")
    assert planned.kv_bytes_per_token == KV_BYTES == 2 * 80 * 8 * 128 * 2
    cache = {n: dataclasses.replace(planned, context=n).kv_bytes() for n in (4096, 128_000, 131_072, 10**6)}
    assert cache == {4096: 1_342_177_280, 128_000: 41_943_040_000, 131_072: 40 * 2**30, 10**6: 327_680_000_000}
    block = Block((Sublayer(Attention(64)), Sublayer(SwiGLU(28672))))
    multi_head = plan(Decoder(32000, 8192, (Repeat((block,), 80),)), context=4096, dtype="float16")
    assert multi_head.kv_bytes() == 8 * 1_342_177_280  # one key/value head per query head
    assert multi_head.kv_bytes_per_token == 2 * 8192 * 80 * 2  # 2D per layer: the keys and values of all heads


@pytest.mark.ledger("kv.70b.100k")
def test_100_000_tokens_of_a_70b_model_take_32_8_gb_or_30_5_gib():
    planned = plan(published("llama-2-70b"), context=100_000, dtype="float16")
    assert planned.kv_bytes() == 32_768_000_000 and round(planned.kv_bytes() / 2**30, 1) == 30.5
    thirteen_sequences = dataclasses.replace(planned, context=8192, batch=13)
    assert thirteen_sequences.kv_bytes() // 13 == 2_684_354_560 == 2.5 * 2**30
    assert thirteen_sequences.kv_bytes() == 32.5 * 2**30


@pytest.mark.ledger("q.70b", "calc.quant")
def test_70b_weights_take_the_bits_of_their_format():
    sizes_in_gb = [format_of(name).bytes(SEVENTY_BILLION) / 1e9 for name in ("float32", "float16", "int8", "int4")]
    assert sizes_in_gb == [280, 140, 70, 35]
    assert format_of("int4/128").bytes(SEVENTY_BILLION) == SEVENTY_BILLION * 4.125 / 8
    assert round(format_of("int4/128").bytes(SEVENTY_BILLION) / 1e9, 1) == 36.1
    assert format_of("int4/128").bytes(129) == 65 + 2 * 2  # bytes and groups are rounded up
    with pytest.raises(ValueError, match="did you mean 'int8'"):
        format_of("int88")


@pytest.mark.parametrize(
    ("name", "format"),
    [
        *((type, GGUFBlocks(type)) for type in LAYOUTS),
        ("nf4", NF4(double=False)),
        ("nf4/double", NF4()),
        ("int4/128", Integer(4, group=128, scale_dtype="float16")),
    ],
)
def test_bytes_of_formats_are_those_that_are_stored(name: str, format: NumberFormat) -> None:
    mean = 4 if name == "nf4/double" else 0  # of all scales of a weight
    weight = torch.randn(32, 4096, generator=torch.Generator().manual_seed(0))
    stored = sum(tensor.nbytes for tensor in format.quantize(weight).values())
    assert format_of(name).bytes(weight.numel()) == stored - mean


@pytest.mark.ledger("q.consumer", "calc.quant")
def test_70b_in_four_bits_fits_into_48_gb_and_not_into_32_gb():
    int4 = format_of("int4").bytes(SEVENTY_BILLION)
    assert cached_tokens_that_fit(48 * 10**9, int4, KV_BYTES) == 39_672
    for consumer_gpu in (24 * 10**9, 32 * 10**9):
        assert cached_tokens_that_fit(consumer_gpu, int4, KV_BYTES) == 0
    assert cached_tokens_that_fit(48 * 10**9, int4, 0) is None


@pytest.mark.ledger("kv.exceeds", "calc.crossover")
def test_a_long_cache_is_as_large_as_the_weights():
    float16, int4 = 2 * SEVENTY_BILLION, SEVENTY_BILLION // 2
    assert float16 > 131_072 * KV_BYTES
    assert sequences_to_exceed_weights(float16, KV_BYTES, 131_072) == 4
    assert 3 * 131_072 * KV_BYTES < float16 < 4 * 131_072 * KV_BYTES
    assert tokens_to_match_weights(float16, KV_BYTES) == 427_246 and tokens_to_match_weights(int4, KV_BYTES) == 106_811
    assert tokens_to_match_weights(float16, 0) is None and sequences_to_exceed_weights(float16, 0, 9) is None


@pytest.mark.ledger("inf.reads")
def test_a_decoding_step_reads_the_weights_and_the_cache():
    planned = plan(published("llama-2-70b"), context=4096, dtype="float16")
    assert round(2 * SEVENTY_BILLION / planned.cache_read) == 104
    assert planned.weights_read == planned.weight_bytes() - 2 * (32000 - 1) * 8192  # one row of the embedding
    assert planned.weights_read > 100 * planned.cache_read
    large_batch = dataclasses.replace(planned, context=131_072, batch=8)
    assert large_batch.cache_read > 2 * large_batch.weights_read


def test_intensity_is_about_the_batch_size_in_16_bits():
    planned = plan(published("llama-7b"), context=1, dtype="float16")
    assert planned.intensity == pytest.approx(1, rel=0.01)
    assert dataclasses.replace(planned, batch=64).intensity == pytest.approx(64, rel=0.02)


@pytest.mark.ledger("inf.bound", exact=True)
@pytest.mark.parametrize("device", DEVICES.values(), ids=list(DEVICES))
@pytest.mark.parametrize("name", ["llama-7b", "llama-2-70b"])
def test_prefill_is_bound_by_compute_and_decode_by_bandwidth(name: str, device: Device) -> None:
    planned = plan(published(name), context=2048, dtype="float16")
    reading = planned.weights_read / device.bandwidth
    assert planned.flops(2048, 2048) / device.flops > 3 * reading  # of a prompt, which reads the weights once too
    assert planned.decode_flops / device.flops < reading / 50
    batched = dataclasses.replace(planned, context=128, batch=32)  # as long as its cache is small
    per_token = device.seconds(batched.batch * batched.decode_flops, batched.bytes_read) / batched.batch
    assert per_token < reading / 20


@pytest.mark.ledger("eff.crossover", "calc.crossover")
def test_attention_costs_as_much_as_the_rest_at_six_times_the_width():
    block = Block((Sublayer(Attention(32)), Sublayer(FeedForward(4 * 4096))))
    spec = Decoder(32000, 4096, (Repeat((block,), 4),), context=4096)
    assert attention_equals_rest(spec) == 6 * 4096 == 24_576
    attention_only = Decoder(32000, 4096, (Repeat((Block((Sublayer(Attention(32)),)),), 4),), context=4096)
    assert attention_equals_rest(attention_only) == 2 * 4096
    assert attention_equals_rest(published("llama-7b")) == 24_704
    assert groups(plan(published("llama-7b")))["crossovers"]["if_causal"] == 2 * 24_704
    without_attention = Decoder(32, 8, (Repeat((Block((Sublayer(FeedForward(16)),)),), 2),), context=8)
    assert attention_equals_rest(without_attention) is None


@pytest.mark.ledger("moe.2of8", "moe.fig", "calc.moe")
def test_expert_size_follows_from_total_and_active_parameters():
    assert relative_to_dense(8, 2) == (8, 2)  # full-size experts: eight times the weights, twice the work
    assert relative_to_dense(8, 2, expert_size=0.5) == (4, 1)
    shared, expert = shared_and_expert_params(7.5, 2.1, experts=8, top_k=2)
    assert (shared, expert) == (pytest.approx(0.3), pytest.approx(0.9))
    assert round((shared + 2 * expert) / (shared + 8 * expert), 2) == 0.28
    router = Router().build(1, 8, 2)
    router.proj.weight.data = torch.tensor([[0.38], *[[0.1]] * 6, [0.62]]).log()
    weights = router.route(router(torch.ones(1, 1))).weights
    assert weights.tolist() == [pytest.approx([0.62, 0.38])]  # normalized over the two chosen experts
    with pytest.raises(ValueError, match="top_k=8 must be from 1 to 7"):
        shared_and_expert_params(7.5, 7.5, 8, 8)


@pytest.mark.ledger("moe.mixtral", "moe.2of8", "calc.moe")
def test_mixtral_has_the_published_total_and_active_parameters():
    planned = plan(published("mixtral-8x7b"), dtype="float16")
    assert (planned.parameters, planned.count.active) == (46_702_792_704, 12_879_925_248)
    assert round(100 * planned.count.active / planned.parameters, 1) == 27.6
    assert round(planned.weight_bytes() / 1e9, 1) == 93.4  # with all experts
    table = (32000 - 1) * 4096
    assert planned.weights_read == 2 * (planned.count.active - table)
    large_batch = dataclasses.replace(planned, batch=64)  # nearly every expert is chosen by some token
    assert 0.999 < large_batch.weights_read / (2 * (planned.parameters - table)) < 1.0001
    expert, experts = SwiGLU(14336), published("mixtral-8x7b").blocks[0].sublayers[1].body
    router = 4096 * 8
    assert parameters_of(experts, 4096) == 8 * parameters_of(expert, 4096) + router
    assert experts.flops(4096, 1, 0) == 2 * expert.flops(4096, 1, 0) + 2 * router  # full-size experts: twice the work
    smaller = dataclasses.replace(experts, expert=SwiGLU(7168))
    assert smaller.flops(4096, 1, 0) == expert.flops(4096, 1, 0) + 2 * router


@pytest.mark.ledger("moe.mixtral")
def test_mixtral_has_the_parameters_of_transformers():
    from transformers import MixtralConfig, MixtralForCausalLM

    with torch.device("meta"):
        theirs = MixtralForCausalLM(MixtralConfig())
    assert sum(parameter.numel() for parameter in theirs.parameters()) == 46_702_792_704


@pytest.mark.ledger("model.base2017", "ffn.share")
def test_the_transformer_of_2017_has_63_million_parameters():
    planned = plan(published("transformer-2017"), context=512)
    parts = planned.count.parts

    def stack(name: str) -> int:
        return sum(number for part, number in parts.items() if part.startswith(name))

    assert parts["embedding"] == 37_000 * 512
    assert [round(n / 1e6, 1) for n in (stack("source"), stack("target"), parts["embedding"])] == [18.9, 25.2, 18.9]
    assert round(planned.parameters / 1e6, 1) == 63.0
    assert planned.attention_shapes == {(8, 8, 64): 18}
    assert parts["target feedforward"] / stack("target") == pytest.approx(0.5, abs=0.001)


@pytest.mark.ledger("model.bertbase")
def test_bert_base_has_the_parameters_of_transformers():
    from transformers import BertConfig, BertModel

    with torch.device("meta"):
        theirs = BertModel(BertConfig())
    assert plan(published("bert-base")).parameters == 109_482_240 == sum(p.numel() for p in theirs.parameters())


@pytest.mark.ledger("vit.b16", "vit.196", "calc.vision")
def test_vit_b16_has_the_parameters_of_transformers():
    from transformers import ViTConfig, ViTForImageClassification

    with torch.device("meta"):
        theirs = ViTForImageClassification(ViTConfig(num_labels=1000))
    spec = published("vit-b16")
    assert plan(spec).parameters == 86_567_656 == sum(parameter.numel() for parameter in theirs.parameters())
    assert spec.input.grid == (14, 14) and spec.input.length == plan(spec).context == 197
    assert spec.input.channels * 16 * 16 == 768
    larger = vit(image=384)
    assert plan(larger).context == 577
    assert plan(larger).parameters - plan(spec).parameters == (577 - 197) * 768  # the positions only
    with pytest.raises(ValueError, match="225 is not divisible by 16; resize or crop to 224 or 240"):
        vit(image=225)


def test_an_encoder_has_no_cache_and_does_not_decode():
    planned = plan(published("vit-b16"))
    assert planned.decoder is None and planned.kv_bytes() == planned.state_bytes == planned.weights_read == 0
    assert "cache_bytes" not in groups(planned)


def test_an_encoder_decoder_caches_its_source():
    planned = plan(published("transformer-2017"), context=100)
    assert planned.kv_bytes_per_token == 2 * 6 * 2 * 512 * 4  # keys and values of the target and of the source
    source = sum(number for part, number in planned.count.parts.items() if part.startswith("source"))
    assert planned.weights_read == 4 * (planned.parameters - source)


@pytest.mark.ledger("blk.recipes")
def test_llama_replaces_most_parts_of_the_2017_transformer():
    old, new = published("transformer-2017"), published("llama-2-70b")
    old_block, new_block = old.target.blocks[0], new.blocks[0]
    assert (old_block.style, old_block.sublayers[0].norm.kind) == ("post", "layernorm")
    assert (new_block.style, new_block.sublayers[0].norm.kind) == ("pre", "rmsnorm")
    feedforward, gated = old_block.sublayers[-1].body, new_block.sublayers[-1].body
    assert (feedforward.activation, feedforward.bias, gated.kind, gated.bias) == ("relu", True, "swiglu", False)
    assert feedforward.hidden == 4 * 512 and published("llama-7b").blocks[0].sublayers[1].body.hidden == 11008
    assert old.target.position.kind == "sinusoidal" and new_block.sublayers[0].body.position.kind == "rope"
    kv_heads = (old_block.sublayers[0].body.sizes(512)[1], new_block.sublayers[0].body.sizes(8192)[1])
    assert kv_heads == (8, 8)  # for 8 and for 64 query heads
    assert old_block.dropout > 0 and new_block.dropout == 0
    assert old.shared and old.target.tied  # one table for both stacks and the head
    assert not any(published(name).tied for name in ("llama-7b", "llama-2-70b", "llama-3.1-70b"))
