"""Encoder-decoders as `transformers` computes them: both stacks, gradients, cached greedy text, padding; and back."""

import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GenerationMixin

from regard.checkpoint import export, load, save
from regard.engine.stores.contiguous import Contiguous
from regard.engine.stores.paged import Paged
from regard.families import family
from regard.kernels.attention.patterns.longformer import Longformer
from regard.layout import TokenLayout
from regard.models.stack import Repeat
from regard.parts.block import Block
from regard.parts.frames import Frames
from regard.parts.position.t5 import T5Buckets
from regard.verify.verdict import verify
from regard.weights.table import WeightsError
from tests.families import test_equal
from tests.families.cases import encoder_decoders, params
from tests.families.pairs import Pair, make, stored_gradients
from tests.families.test_equal import LIMIT
from tests.laws import error, places

START = 7
BIAS = "final_logits_bias"  # a buffer of theirs: not trained, but published files have numbers in it


@pytest.fixture(scope="module", params=params(encoder_decoders.CASES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    pair = make(request.param, tmp_path_factory.mktemp("theirs"))
    if hasattr(pair.theirs, BIAS):
        nn.init.normal_(pair.theirs.final_logits_bias, std=0.3)
        pair.theirs.save_pretrained(pair.folder)
        pair.ours = load(pair.folder)
    return pair


def tokens(*shape: int) -> Tensor:
    return test_equal.tokens(*shape).clamp_min(1)  # LED needs padding, 0, whose vector theirs never trains


def source(pair: Pair, rows: int, length: int = 19) -> Tensor:
    """Words, or sound of the one length that theirs reads."""
    spec = pair.ours.spec.source
    if not isinstance(spec.input, Frames):
        return tokens(rows, length).flip(1)
    return torch.randn(rows, spec.input.channels, 2 * spec.position.length, generator=torch.Generator().manual_seed(6))


def watch(stack: nn.Module, seen: list[Tensor]) -> list[Any]:
    return [block.register_forward_hook(lambda _, __, out: seen.append(out[0])) for block in stack.blocks]


@torch.no_grad()
def test_logits_and_every_hidden_state_of_both_stacks(pair: Pair) -> None:
    ours, data, text = pair.ours, source(pair, 3), tokens(3, 23)
    read, written, last = [], [], []
    hooks = [*watch(ours.source.stack, read), *watch(ours.target.stack, written)]
    hooks += [
        half.norm.register_forward_hook(lambda _, __, out: last.append(out)) for half in (ours.source, ours.target)
    ]
    logits = ours(data, text)
    for hook in hooks:
        hook.remove()
    theirs = pair.theirs(data, decoder_input_ids=text, output_hidden_states=True)
    assert error(logits, theirs.logits) <= LIMIT
    for found, expected in ((read, theirs.encoder_hidden_states), (written, theirs.decoder_hidden_states)):
        between = expected[1:-1]  # theirs: embeddings, every block but the last, then the normed last
        assert len(found) == len(between) + 1
        assert all(error(f, e) <= LIMIT for f, e in zip(found, between, strict=False))
    assert error(last[0], theirs.encoder_last_hidden_state) <= LIMIT
    assert error(last[1], theirs.decoder_hidden_states[-1]) <= LIMIT


def test_loss_and_gradients(pair: Pair, tmp_path: Path) -> None:
    data, text, labels = source(pair, 2), tokens(2, 17), tokens(2, 17).flip(1)
    pair.theirs.zero_grad()
    pair.ours.zero_grad()
    expected = pair.theirs(data, decoder_input_ids=text, labels=labels).loss
    loss = F.cross_entropy(pair.ours(data, text).flatten(0, 1), labels.flatten())
    assert error(loss, expected) <= LIMIT
    expected.backward()
    loss.backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in pair.ours.named_parameters()}
    found = dict(family(pair.model_type).table(pair.ours.spec).write(gradients))
    stored = stored_gradients(pair.theirs, tmp_path)
    trained = {name for name, parameter in pair.theirs.named_parameters() if parameter.grad is not None}
    assert trained <= found.keys() <= stored.keys()
    for name in found.keys() - {BIAS}:
        assert error(found[name], stored[name]) <= LIMIT, name


@torch.no_grad()
def test_forty_greedy_tokens_with_both_caches(pair: Pair) -> None:
    data, prompt = source(pair, 4), tokens(4, 7)
    prompt[:, 0] = START
    # Whisper's own generate adds rules for timestamps; the plain one is meant here.
    expected = GenerationMixin.generate(
        pair.theirs, data, decoder_input_ids=prompt, max_new_tokens=40, do_sample=False, decoder_start_token_id=START,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    memory = pair.ours.spec.memory()
    stores = (
        Contiguous(memory, 4, 48, torch.float32, source=48),
        Paged(memory, 4, 48, 48, torch.float32, block=4, source=48),
    )
    for store in stores:
        assert all(store.reserve(row, 48) for row in range(4))
        logits = pair.ours(
            data, prompt, layout=(now := TokenLayout(torch.arange(7).expand(4, 7))), states=store.begin_forward(now)
        )
        text = prompt
        for step, wanted in enumerate(expected.logits, 7):
            assert error(logits[:, -1], wanted) <= LIMIT  # small models soon repeat themselves: ids alone prove little
            text = torch.cat([text, logits[:, -1:].argmax(-1)], 1)
            logits = pair.ours(
                None,
                text[:, -1:],
                layout=(now := TokenLayout(torch.full((4, 1), step))),
                states=store.begin_forward(now),
            )
        assert torch.equal(text, expected.sequences) and text.shape == (4, 47)


@torch.no_grad()
def test_padding(pair: Pair) -> None:
    """On the left where positions are relative: theirs counts absolute ones of a source from the first padding."""
    relative = isinstance(pair.ours.spec.source.position, T5Buckets)
    told = "decoder_position_ids" in inspect.signature(pair.theirs.forward).parameters
    data, text = source(pair, 3, 13), tokens(3, 12)
    heard = isinstance(pair.ours.spec.source.input, Frames)  # theirs does not mask sounds
    for left in (False, True) if relative or told else (False,):
        source_layout, layout = places([13, 2, 7], 13, left), places([4, 9, 12], 12, left)
        masks = {"decoder_attention_mask": layout.valid.long()}
        masks |= {} if heard else {"attention_mask": source_layout.valid.long()}
        masks |= {"decoder_position_ids": layout.positions} if told else {}
        theirs = pair.theirs(data, decoder_input_ids=text, **masks).logits
        ours = pair.ours(data, text, None if heard else source_layout, layout)
        assert error(ours[layout.valid], theirs[layout.valid]) <= LIMIT


@torch.no_grad()
def test_exported_it_is_the_same_model_there(pair: Pair, tmp_path: Path) -> None:
    export(pair.ours, tmp_path / "out", pair.model_type)
    back = type(pair.theirs).from_pretrained(tmp_path / "out")
    back.config.pad_token_id = pair.theirs.config.pad_token_id  # a tokenizer says it, and there is none here
    data, text = source(pair, 2), tokens(2, 20)
    assert torch.equal(back(data, decoder_input_ids=text).logits, pair.theirs(data, decoder_input_ids=text).logits)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", pair.folder))
    assert ours.keys() <= theirs.keys() <= ours.keys() | set(without_use(pair.theirs))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def without_use(theirs: nn.Module) -> list[str]:
    """What they store and could compute, or read nowhere: sinusoids, and untied a table that was shared when tied."""
    frozen = [name for name, parameter in theirs.named_parameters() if not parameter.requires_grad]
    base = f"{theirs.base_model_prefix}." if hasattr(theirs, theirs.base_model_prefix) else ""
    return frozen + ([] if theirs.config.tie_word_embeddings else [f"{base}shared.weight"])


@torch.no_grad()
def test_saved_and_loaded_it_is_bit_identical(pair: Pair, tmp_path: Path) -> None:
    save(pair.ours, tmp_path / "own")
    again = load(tmp_path / "own")
    assert again.spec == pair.ours.spec
    assert (again.target.head.weight is again.target.embedding.weight) == pair.ours.spec.target.tied
    expected = pair.ours.state_dict()
    assert again.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())


def test_the_config_comes_back(pair: Pair) -> None:
    foreign = family(pair.model_type)
    assert foreign.spec(foreign.config(pair.ours.spec)) == pair.ours.spec
    assert foreign.spec(pair.theirs.config.to_dict()) == pair.ours.spec


@pytest.mark.slow
def test_it_keeps_every_law(pair: Pair) -> None:
    broken = [verdict for verdict in verify(pair.ours, 24, 0) if verdict.result == "FAIL"]
    assert not broken, broken


@torch.no_grad()
def test_a_head_of_its_own_as_published_in_t5_version_one_point_one(tmp_path: Path) -> None:
    """transformers 5 ties what it makes, and keeps two tables that it finds; it writes that they are one."""
    pair = make(encoder_decoders.CASES["t5: gated gelu unscaled"], tmp_path / "theirs")
    pair.theirs.lm_head.weight = nn.Parameter(torch.randn(97, 48))
    pair.theirs.save_pretrained(pair.folder)
    with pytest.raises(WeightsError, match=r"lm_head.weight is a copy .* set tie_word_embeddings to false"):
        load(pair.folder)
    say(pair.folder, tie_word_embeddings=False)
    ours, data, text = load(pair.folder), source(pair, 2), tokens(2, 9)
    assert not ours.spec.target.tied and ours.spec.target.logit_scale == 1.0
    expected = pair.theirs(data, decoder_input_ids=text).logits
    assert error(ours(data, text), expected) <= LIMIT
    export(ours, tmp_path / "out", "t5")
    back = type(pair.theirs).from_pretrained(tmp_path / "out")
    assert torch.equal(back(data, decoder_input_ids=text).logits, expected)


def say(folder: Path, **settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))


@torch.no_grad()
def test_files_as_others_wrote_them(tmp_path: Path) -> None:
    """A base model's names, copies of the table, no bias; and a bias that is no zero when it is there."""
    pair = make(encoder_decoders.CASES["bart: tied"], tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    base = {name.removeprefix("model."): tensor for name, tensor in stored.items() if name != BIAS}
    table = base["shared.weight"]
    base |= {"encoder.embed_tokens.weight": table.clone(), "decoder.embed_tokens.weight": table.clone()}
    save_file(base | {"encoder.version": torch.ones(1)}, tmp_path / "model.safetensors")
    data, text = source(pair, 2), tokens(2, 9)
    assert torch.equal(load(tmp_path)(data, text), pair.ours(data, text))
    save_file(base | {"decoder.embed_tokens.weight": table + 1}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="model.decoder.embed_tokens.weight is a copy of model.shared.weight"):
        load(tmp_path)


def test_sinusoids_may_be_missing_but_not_others(tmp_path: Path) -> None:
    make(encoder_decoders.CASES["pegasus: scaled"], tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.decoder.embed_positions.weight"
    save_file(stored | {name: stored[name].half()}, tmp_path / "model.safetensors")
    load(tmp_path)
    save_file({key: tensor for key, tensor in stored.items() if key != name}, tmp_path / "model.safetensors")
    load(tmp_path)
    save_file(stored | {name: stored[name].flip(1)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=f"{name} is the same in every such model, but holds other numbers"):
        load(tmp_path)


@torch.no_grad()
def test_global_tokens_of_led(tmp_path: Path) -> None:
    """A call of theirs says which are global, a spec of ours does."""
    pair = make(encoder_decoders.CASES["led: window smaller than the text"], tmp_path)
    data, text = source(pair, 2), tokens(2, 9)
    said = torch.zeros_like(data)
    said[:, :2] = 1
    expected = pair.theirs(data, decoder_input_ids=text, global_attention_mask=said).logits
    spec = pair.ours.spec
    (run,) = spec.source.layers
    (first, *others), style = run.blocks[0].sublayers, run.blocks[0].style
    seen = replace(first, body=replace(first.body, mask=Longformer(3, globals=2)))
    layers = (Repeat((Block((seen, *others), style),), run.times),)
    ours = replace(spec, source=replace(spec.source, layers=layers)).build().eval()
    ours.load_state_dict(pair.ours.state_dict())
    assert error(ours(data, text), expected) <= LIMIT
    assert error(pair.ours(data, text), expected) > 100 * LIMIT
