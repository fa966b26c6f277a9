"""Encoder-decoders equal those of `transformers`: both stacks, gradients, greedy tokens, padding, export."""

import inspect
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GenerationMixin

from regard.checkpoint import export, load
from regard.engine.engine import Engine
from regard.engine.request import Sampling
from regard.engine.stores.contiguous import Contiguous
from regard.engine.stores.paged import Paged
from regard.kernels.attention.patterns.longformer import Longformer
from regard.layout import TokenLayout
from regard.models.stack import Repeat
from regard.parts.block import Block
from regard.parts.frames import Frames
from regard.parts.position.t5 import T5Buckets
from regard.weights.table import WeightsError
from tests.families import test_decoders
from tests.families.cases import encoder_decoders, one_per_class, params
from tests.families.pairs import (
    LIMIT,
    Pair,
    check_config_roundtrip,
    check_laws,
    check_saved_and_loaded,
    make_pair,
    our_gradients,
    record_hidden_states,
    stored_gradients,
)
from tests.laws import assert_equal_weights, error, layout_with_padding

START = 7
BIAS = "final_logits_bias"  # a buffer in transformers: not trained, but nonzero in published files


@pytest.fixture(scope="module", params=params(encoder_decoders.CASES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    pair = make_pair(request.param, tmp_path_factory.mktemp("theirs"))
    if hasattr(pair.theirs, BIAS):
        nn.init.normal_(pair.theirs.final_logits_bias, std=0.3)
        pair.theirs.save_pretrained(pair.folder)
        pair.ours = load(pair.folder)
    return pair


def tokens(*shape: int) -> Tensor:
    # 0 is LED's padding id, whose embedding transformers does not train.
    return test_decoders.tokens(*shape).clamp_min(1)


def source(pair: Pair, rows: int, length: int = 19) -> Tensor:
    """Random token ids, or frames of the only length that Whisper accepts."""
    spec = pair.ours.spec.source
    if not isinstance(spec.input, Frames):
        return tokens(rows, length).flip(1)
    return torch.randn(rows, spec.input.channels, 2 * spec.position.length, generator=torch.Generator().manual_seed(6))


@torch.no_grad()
def test_logits_and_hidden_states_of_both_stacks_equal_transformers(pair: Pair) -> None:
    ours, inputs, ids = pair.ours, source(pair, 3), tokens(3, 23)
    theirs, final_norm_outputs = pair.theirs(inputs, decoder_input_ids=ids, output_hidden_states=True), []
    hooks = [
        x.norm.register_forward_hook(lambda _, __, out: final_norm_outputs.append(out))
        for x in (ours.source, ours.target)
    ]
    with record_hidden_states(ours.source.stack) as encoded, record_hidden_states(ours.target.stack) as decoded:
        assert error(ours(inputs, ids), theirs.logits) <= LIMIT
    for hook in hooks:
        hook.remove()
    for found, expected in ((encoded, theirs.encoder_hidden_states), (decoded, theirs.decoder_hidden_states)):
        assert len(found) == len(expected)
        block_outputs = zip(found[1:-1], expected[1:-1], strict=True)  # without the embeddings and the final norm
        assert all(error(f, e) <= LIMIT for f, e in block_outputs)
    assert error(final_norm_outputs[0], theirs.encoder_last_hidden_state) <= LIMIT
    assert error(final_norm_outputs[1], theirs.decoder_hidden_states[-1]) <= LIMIT


def test_loss_and_gradients_equal_transformers(pair: Pair, tmp_path: Path) -> None:
    inputs, ids, labels = source(pair, 2), tokens(2, 17), tokens(2, 17).flip(1)
    pair.theirs.zero_grad()
    pair.ours.zero_grad()
    expected = pair.theirs(inputs, decoder_input_ids=ids, labels=labels).loss
    loss = F.cross_entropy(pair.ours(inputs, ids).flatten(0, 1), labels.flatten())
    assert error(loss, expected) <= LIMIT
    expected.backward()
    loss.backward()
    found = our_gradients(pair)
    stored = stored_gradients(pair.theirs, tmp_path)
    trained = {name for name, parameter in pair.theirs.named_parameters() if parameter.grad is not None}
    assert trained <= found.keys() <= stored.keys()
    for name in found.keys() - {BIAS}:
        assert error(found[name], stored[name]) <= LIMIT, name


@torch.no_grad()
def test_forty_greedy_tokens_with_both_caches_equal_transformers(pair: Pair) -> None:
    inputs, prompt = source(pair, 4), tokens(4, 7)
    prompt[:, 0] = START
    # GenerationMixin's generate, because Whisper's own generate adds rules for timestamps.
    expected = GenerationMixin.generate(
        pair.theirs, inputs, decoder_input_ids=prompt, max_new_tokens=40, do_sample=False, decoder_start_token_id=START,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    memory = pair.ours.spec.memory()
    stores = (
        Contiguous(memory, 4, 48, torch.float32, source=48),
        Paged(memory, 4, 48, torch.float32, block=4, source=48, blocks=48),
    )
    for store in stores:
        assert all(store.reserve(row, 48) for row in range(4))
        logits = pair.ours(
            inputs,
            prompt,
            layout=(layout := TokenLayout(torch.arange(7).expand(4, 7))),
            states=store.begin_forward(layout),
        )
        ids = prompt
        for step, expected_logits in enumerate(expected.logits, 7):
            # small models soon repeat themselves, so equal ids alone are a weak test
            assert error(logits[:, -1], expected_logits) <= LIMIT
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
            logits = pair.ours(
                None,
                ids[:, -1:],
                layout=(layout := TokenLayout(torch.full((4, 1), step))),
                states=store.begin_forward(layout),
            )
        assert torch.equal(ids, expected.sequences) and ids.shape == (4, 47)


def test_engine_generates_the_tokens_of_transformers(pair: Pair) -> None:
    """The engine serves four sources with too few blocks for all at once; transformers generates for one at a time."""
    if isinstance(pair.ours.spec.source.input, Frames):
        return  # tests/engine/test_signals.py
    engine = Engine(pair.ours, rows=3, capacity=24, store=partial(Paged, block=4, blocks=7))
    settings = {"max_new_tokens": 12, "decoder_start_token_id": START, "do_sample": False}
    settings |= {"forced_bos_token_id": 5, "forced_eos_token_id": 6, "suppress_tokens": [8, 9]}
    sampling = Sampling(max_new=12, temperature=0, forced_bos_id=5, forced_eos_id=6, suppress_ids=(8, 9))
    sources = [source(pair, 1, length)[:, :length] for length in (19, 3, 8, 14)]
    requests = [engine.submit([START], sampling, ids[0].tolist()) for ids in sources]
    while not engine.idle:
        engine.step()
    assert engine.metrics()["preemptions"] > 0
    for request, ids in zip(requests, sources, strict=True):
        expected = GenerationMixin.generate(pair.theirs, ids, attention_mask=torch.ones_like(ids), **settings)
        assert request.tokens == expected[0].tolist()


@torch.no_grad()
def test_logits_of_padded_batches_equal_transformers(pair: Pair) -> None:
    """Padding on the left is compared only if the model has relative positions or accepts position ids.

    Otherwise transformers counts positions from the first padding token.
    """
    relative = isinstance(pair.ours.spec.source.position, T5Buckets)
    accepts_positions = "decoder_position_ids" in inspect.signature(pair.theirs.forward).parameters
    inputs, ids = source(pair, 3, 13), tokens(3, 12)
    audio = isinstance(pair.ours.spec.source.input, Frames)  # transformers does not mask frames
    for left in (False, True) if relative or accepts_positions else (False,):
        source_layout, layout = layout_with_padding([13, 2, 7], 13, left), layout_with_padding([4, 9, 12], 12, left)
        masks = {"decoder_attention_mask": layout.valid.long()}
        masks |= {} if audio else {"attention_mask": source_layout.valid.long()}
        masks |= {"decoder_position_ids": layout.positions} if accepts_positions else {}
        theirs = pair.theirs(inputs, decoder_input_ids=ids, **masks).logits
        ours = pair.ours(inputs, ids, None if audio else source_layout, layout)
        assert error(ours[layout.valid], theirs[layout.valid]) <= LIMIT


@torch.no_grad()
def test_exported_model_is_equal_in_transformers(pair: Pair, tmp_path: Path) -> None:
    export(pair.ours, tmp_path / "out", pair.model_type)
    reloaded = type(pair.theirs).from_pretrained(tmp_path / "out")
    reloaded.config.pad_token_id = pair.theirs.config.pad_token_id  # a tokenizer would set it
    inputs, ids = source(pair, 2), tokens(2, 20)
    expected = pair.theirs(inputs, decoder_input_ids=ids).logits
    assert error(reloaded(inputs, decoder_input_ids=ids).logits, expected) <= LIMIT
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", pair.folder))
    assert ours.keys() <= theirs.keys() <= ours.keys() | set(unused_tensors(pair.theirs))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def unused_tensors(theirs: nn.Module) -> list[str]:
    """Tensors that transformers stores and we do not: sinusoids, and in an untied model the shared embedding."""
    frozen = [name for name, parameter in theirs.named_parameters() if not parameter.requires_grad]
    prefix = f"{theirs.base_model_prefix}." if hasattr(theirs, theirs.base_model_prefix) else ""
    return frozen + ([] if theirs.config.tie_word_embeddings else [f"{prefix}shared.weight"])


def test_saved_and_loaded_is_bit_identical(pair: Pair, tmp_path: Path) -> None:
    target = check_saved_and_loaded(pair, tmp_path / "saved").target
    assert (target.head.weight is target.embedding.weight) == pair.ours.spec.target.tied


def test_config_and_spec_round_trip(pair: Pair) -> None:
    check_config_roundtrip(pair)


@pytest.mark.slow
@pytest.mark.parametrize("pair", one_per_class(encoder_decoders.CASES), indirect=True)
def test_laws_hold(pair: Pair) -> None:
    check_laws(pair)


@torch.no_grad()
def test_untied_head_of_t5_version_1_1_equals_transformers(tmp_path: Path) -> None:
    """transformers 5 keeps the two matrices of such a file, but writes a config that declares them tied."""
    pair = make_pair(encoder_decoders.CASES["t5: gated gelu unscaled"], tmp_path / "theirs")
    pair.theirs.lm_head.weight = nn.Parameter(torch.randn(97, 48))
    pair.theirs.save_pretrained(pair.folder)
    inputs, ids = source(pair, 2), tokens(2, 9)
    with pytest.warns(UserWarning, match="ties lm_head.weight to shared.weight"):
        ours = load(pair.folder)
    assert not ours.spec.target.tied and ours.spec.target.logit_scale == 1.0
    expected = pair.theirs(inputs, decoder_input_ids=ids).logits
    assert error(ours(inputs, ids), expected) <= LIMIT
    export(ours, tmp_path / "out", "t5")
    reloaded = type(pair.theirs).from_pretrained(tmp_path / "out")
    assert_equal_weights(reloaded, pair.theirs)
    assert error(reloaded(inputs, decoder_input_ids=ids).logits, expected) <= LIMIT


@torch.no_grad()
def test_base_model_names_and_copied_embeddings_are_read(tmp_path: Path) -> None:
    """Names of a base model, copies of the embedding and no bias are accepted; a copy with other values is refused."""
    pair = make_pair(encoder_decoders.CASES["bart: tied"], tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    base_model = {name.removeprefix("model."): tensor for name, tensor in stored.items() if name != BIAS}
    table = base_model["shared.weight"]
    base_model |= {"encoder.embed_tokens.weight": table.clone(), "decoder.embed_tokens.weight": table.clone()}
    save_file(base_model | {"encoder.version": torch.ones(1)}, tmp_path / "model.safetensors")
    inputs, ids = source(pair, 2), tokens(2, 9)
    loaded = load(tmp_path)
    assert_equal_weights(loaded, pair.ours)
    assert error(loaded(inputs, ids), pair.ours(inputs, ids)) <= LIMIT
    save_file(base_model | {"decoder.embed_tokens.weight": table + 1}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="model.decoder.embed_tokens.weight should equal model.shared.weight"):
        load(tmp_path)


def test_sinusoids_may_be_missing_but_not_different(tmp_path: Path) -> None:
    make_pair(encoder_decoders.CASES["pegasus: scaled"], tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.decoder.embed_positions.weight"
    save_file(stored | {name: stored[name].half()}, tmp_path / "model.safetensors")
    load(tmp_path)
    save_file({key: tensor for key, tensor in stored.items() if key != name}, tmp_path / "model.safetensors")
    load(tmp_path)
    save_file(stored | {name: stored[name].flip(1)}, tmp_path / "model.safetensors")
    with pytest.raises(
        WeightsError, match=f"{name} should be the same in every model of this family, but its values differ"
    ):
        load(tmp_path)


@torch.no_grad()
def test_global_tokens_of_led_equal_transformers(tmp_path: Path) -> None:
    """In transformers an argument of forward selects the global tokens; here the spec does."""
    pair = make_pair(encoder_decoders.CASES["led: window shorter than the sequence"], tmp_path)
    inputs, ids = source(pair, 2), tokens(2, 9)
    mask = torch.zeros_like(inputs)
    mask[:, :2] = 1
    expected = pair.theirs(inputs, decoder_input_ids=ids, global_attention_mask=mask).logits
    spec = pair.ours.spec
    (repeat,) = spec.source.layers
    (attention, *others), style = repeat.blocks[0].sublayers, repeat.blocks[0].style
    attention = replace(attention, body=replace(attention.body, mask=Longformer(3, globals=2)))
    layers = (Repeat((Block((attention, *others), style),), repeat.times),)
    ours = replace(spec, source=replace(spec.source, layers=layers)).build().eval()
    ours.load_state_dict(pair.ours.state_dict())
    assert error(ours(inputs, ids), expected) <= LIMIT
    assert error(pair.ours(inputs, ids), expected) > 100 * LIMIT


@torch.no_grad()
def test_switch_transformers_drops_no_tokens_at_inference(tmp_path: Path) -> None:
    """Equal to transformers up to `expert_capacity` tokens; a warning says that longer sequences can differ."""
    model, settings = encoder_decoders.CASES["switch transformers: experts in every second layer"]
    config = transformers.SwitchTransformersConfig(**settings | {"expert_capacity": 9, "initializer_factor": 1.0})
    torch.manual_seed(0)
    theirs = getattr(transformers, model)(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    with pytest.warns(UserWarning, match="expert_capacity=9 is not applied: no token is dropped at inference"):
        ours = load(tmp_path / "theirs")
    for length, equal in ((9, True), (60, False)):
        ids = tokens(2, length)
        assert (error(ours(ids, ids), theirs(ids, decoder_input_ids=ids).logits) <= LIMIT) == equal
    export(ours, tmp_path / "out", "switch_transformers")
    reloaded = type(theirs).from_pretrained(tmp_path / "out").eval()
    assert error(ours(ids, ids), reloaded(ids, decoder_input_ids=ids).logits) <= LIMIT
