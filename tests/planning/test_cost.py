"""The plan equals the built model: PyTorch's FLOP counter, the modules' parameters, the tensors of the stores."""

import dataclasses
import os
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from regard.engine.stores.contiguous import Contiguous
from regard.engine.stores.paged import Paged
from regard.engine.stores.states import FixedStorage
from regard.layout import TokenLayout
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.outputs import materialize
from regard.models.stack import Repeat
from regard.parts.attention import Attention, use_backend
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import FeedForward, SwiGLU
from regard.parts.input import Tokens
from regard.parts.linear_attention import LinearAttention
from regard.parts.position.learned import Learned
from regard.parts.position.rope import Rope
from regard.parts.recurrent import RecurrentCell
from regard.parts.short_convolution import ShortConvolution
from regard.planning import plan
from regard.planning.parameters import all_bodies
from tests.laws import MODELS

MIXERS = {
    "mha": Attention(heads=4),
    "gqa": Attention(heads=4, kv_heads=2, position=Rope(), bias=True),
    "mqa": Attention(heads=4, kv_heads=1, head_dim=12),
    "linear": LinearAttention(heads=4),
    "convolution": ShortConvolution(taps=3),
}
SPECS = {
    f"{name}-{'tied' if tied else 'untied'}": Decoder(
        vocab=51,
        width=32,
        layers=(Repeat((Block((Sublayer(mixer), Sublayer(body))),), 2),),
        position=Learned(200),
        tied=tied,
        context=130,
    )
    for name, mixer in MIXERS.items()
    for tied, body in ((True, SwiGLU(40)), (False, FeedForward(48)))
}
SPECS["hybrid"] = Decoder(
    vocab=51,
    width=32,
    layers=(Repeat(tuple(Block((Sublayer(MIXERS[m]), Sublayer(SwiGLU(40)))) for m in ("gqa", "linear")), 3),),
    context=130,
)


@pytest.fixture(params=SPECS)
def spec(request) -> Decoder:
    return SPECS[request.param]


def counted_flops(spec: Decoder, tokens: int, backward: bool = False) -> int:
    model = spec.build(seed=0)
    use_backend(model, "reference")
    for recurrence in (module for module in model.modules() if isinstance(module, RecurrentCell)):
        recurrence.can_fuse = False  # the counter does not count PyTorch's fused recurrences
    ids = torch.zeros(1, tokens, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        logits = model(ids)
        if backward:
            logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.ledger("calc.params")
def test_parameters_equal_those_of_the_modules(spec):
    planned, model = plan(spec), spec.build(seed=0)
    assert planned.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert planned.count.parts["embedding"] == 51 * 32
    assert planned.count.parts.get("head", 0) == (0 if spec.tied else 51 * 32)
    assert planned.weight_bytes("float32") == sum(p.numel() * p.element_size() for p in model.parameters())


@pytest.mark.ledger("calc.params")
@pytest.mark.parametrize("name", MODELS)
def test_parameters_of_every_model_equal_those_of_its_modules(name):
    model = MODELS[name].build(seed=0)
    assert plan(MODELS[name], context=16).parameters == sum(parameter.numel() for parameter in model.parameters())


def test_parameters_are_counted_by_kind():
    parts = plan(SPECS["hybrid"]).count.parts
    assert set(parts) == {"embedding", "attention", "linear_attention", "swiglu", "norm"}
    assert parts["swiglu"] == 6 * 3 * 32 * 40
    assert parts["linear_attention"] == 3 * 4 * 32 * 32


@pytest.mark.ledger("calc.flops")
@pytest.mark.parametrize("tokens", [1, 17, 64, 130])
def test_flops_equal_those_counted_by_torch(spec, tokens):
    assert plan(spec).flops(tokens, tokens) == counted_flops(spec, tokens)


def is_countable(spec: Decoder) -> bool:
    """PyTorch's counter omits grouped products and the gathers of native sparse attention."""
    return not any(body.kind in ("experts", "native_sparse") for body, _ in all_bodies(spec))


@pytest.mark.ledger("calc.flops")
@pytest.mark.parametrize("name", [name for name, spec in MODELS.items() if is_countable(spec)])
def test_flops_of_every_model_equal_those_counted_by_torch(name):
    """The sequences are no longer than a window: in longer ones PyTorch counts the pairs that the mask excludes."""
    tokens = min([13, *(body.max_keys for body, _ in all_bodies(MODELS[name]) if body.max_keys is not None)])
    assert plan(MODELS[name], context=16).flops(tokens, tokens) == counted_flops(MODELS[name], tokens)


@pytest.mark.parametrize("name", ["gqa-tied", "hybrid"])
def test_flops_of_a_decoding_step_equal_those_counted_by_torch(name):
    spec, context = SPECS[name], 100
    model = spec.build(seed=0)
    use_backend(model, "reference")
    store = Contiguous(spec.memory(), rows=1, capacity=context, dtype=torch.float32)
    with FlopCounterMode(display=False) as counter:
        layout = TokenLayout(torch.tensor([[context - 1]]))
        model(torch.zeros(1, 1, dtype=torch.long), layout, store.begin_forward(layout, check=False))
    assert plan(spec, context).decode_flops == counter.get_total_flops()


@pytest.mark.ledger("calc.flops")
@pytest.mark.parametrize("name", ["mha-untied", "gqa-tied"])
def test_training_flops_are_those_of_three_forwards(name):
    """The backward has two products per product of the forward, in the first layer too: the embedding is trained."""
    spec = SPECS[name]
    assert 3 * plan(spec).flops(130, 130) == counted_flops(spec, 130, backward=True)
    assert plan(spec).training_flops == 3 * plan(spec).flops(130, 130) // 130


def test_ahead_blocks_add_flops_to_training_and_none_to_decoding():
    ahead = dataclasses.replace(SPECS["gqa-tied"], ahead=(SPECS["gqa-tied"].blocks[0],))
    model, tokens = ahead.build(seed=0), 130
    use_backend(model, "reference")
    with FlopCounterMode(display=False) as counter:
        out = model(torch.zeros(1, tokens, dtype=torch.long), outputs=True)
        (materialize(out.logits).sum() + materialize(out.ahead_logits[0]).sum()).backward()
    with_ahead, without_ahead = plan(ahead), plan(SPECS["gqa-tied"])
    assert with_ahead.training_flops == counter.get_total_flops() // tokens
    assert with_ahead.decode_flops == without_ahead.decode_flops
    assert with_ahead.weights_read == without_ahead.weights_read
    assert with_ahead.count.active == without_ahead.parameters < with_ahead.parameters


@pytest.mark.ledger("calc.kv", "kv.formula")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("store", ["contiguous", "paged"])
def test_cache_bytes_equal_those_of_the_stores(spec, store, dtype):
    planned = plan(spec, context=48, batch=3, dtype=dtype)
    if store == "contiguous":  # it has one more slot, for invalid tokens
        storages = Contiguous(spec.memory(), rows=3, capacity=47, dtype=getattr(torch, dtype)).storages
    else:  # it has one more block of 16
        storages = Paged(spec.memory(), rows=3, capacity=48, blocks=8, dtype=getattr(torch, dtype)).storages
    fixed = [t for storage in storages if isinstance(storage, FixedStorage) for t in storage.arrays.values()]
    growing = [t for storage in storages if not isinstance(storage, FixedStorage) for t in storage.arrays.values()]
    assert planned.state_bytes == sum(tensor.nbytes for tensor in fixed)
    assert planned.kv_bytes() == sum(tensor.nbytes for tensor in growing)
    assert planned.kv_bytes_per_token * 48 * 3 == planned.kv_bytes()
    assert dataclasses.replace(planned, context=33).kv_bytes(block=16) == planned.kv_bytes()


def test_a_large_model_is_planned_without_memory_or_random_numbers():
    block = Block((Sublayer(Attention(64, kv_heads=8, position=Rope())), Sublayer(SwiGLU(28672))))
    spec = Decoder(vocab=128256, width=8192, layers=(Repeat((block,), 80),), tied=False, context=8192)
    rng_state = torch.get_rng_state()
    planned = plan(spec, dtype="bfloat16")
    assert planned.parameters == 70_553_706_496  # Llama 3 70B
    assert planned.kv_bytes_per_token == 327_680
    assert torch.equal(torch.get_rng_state(), rng_state)


def test_planning_imports_no_compiler():
    """A random draw on the meta device would import torch._dynamo, which takes longer than the plan."""
    code = f"""
import sys
from regard.models.decoder import Decoder
from regard.planning import plan
plan(Decoder.from_json({SPECS["hybrid"].to_json()!r}))
sys.exit('torch._dynamo' in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": "src"})


def test_training_takes_sixteen_bytes_per_parameter():
    planned = plan(SPECS["mha-tied"], dtype="bfloat16")
    assert sum(planned.training_bytes.values()) == 16 * planned.parameters


@pytest.mark.parametrize(
    "arguments, message",
    [({"context": 0}, "context=0"), ({"batch": -1}, "batch=-1"), ({"dtype": "float3"}, "did you mean 'float32'")],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan(SPECS["hybrid"], **arguments)


def test_a_spec_without_a_context_needs_one():
    without_context = dataclasses.replace(SPECS["hybrid"], context=None)
    with pytest.raises(ValueError, match="has no context"):
        plan(without_context)
    assert plan(without_context, context=8).context == 8
    encoder = Encoder(Tokens(51), 32, without_context.layers, context=77)
    assert plan(encoder).context == 77
