"""Models of images, alone and with text, as in `transformers`: what is said, hidden states, gradients; and back.

Three kinds: an encoder reads images, a pair of encoders judges images and texts, a decoder reads images among words.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from regard.checkpoint import export, load, save
from regard.engine.stores.contiguous import Contiguous
from regard.families import family
from regard.families.common.roundtrip import canonical
from regard.layout import TokenLayout
from regard.models.dual_encoder import DualEncoder
from regard.models.encoder import Encoder
from regard.models.interleaved import Interleaved
from regard.objectives.contrastive import LOSSES
from regard.verify.verdict import verify
from tests.families.cases import params
from tests.families.cases.vision import CASES, END, MARKER, PAIRS, READERS
from tests.families.pairs import Pair, make, stored_gradients
from tests.laws import error, places

LIMIT = 1e-5
ENDS = (4, 8, 6)  # where texts of nine tokens end


@pytest.fixture(scope="session", params=params(CASES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make(request.param, tmp_path_factory.mktemp("theirs"))


@pytest.fixture(scope="session", params=params(PAIRS))
def dual(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make(request.param, tmp_path_factory.mktemp("theirs"))


@pytest.fixture(scope="session", params=params(READERS))
def reader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make(request.param, tmp_path_factory.mktemp("theirs"))


def pictures(spec: Encoder, count: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, spec.input.channels, *spec.input.image, generator=generator)


def texts(*shape: int) -> Tensor:
    """Of neither the marker nor the end token."""
    return torch.randint(MARKER + 1, END, shape, generator=torch.Generator().manual_seed(5))


def inputs(spec: Any) -> dict[str, Tensor]:
    """What theirs is given: three images; with them three texts, or three prompts with an image each."""
    if isinstance(spec, Encoder):
        return {"pixel_values": pictures(spec)}
    if isinstance(spec, DualEncoder):
        tokens = texts(3, 9)
        tokens[range(3), ENDS] = END
        return {"pixel_values": pictures(spec.image), "input_ids": tokens}
    tokens = torch.cat([texts(3, 2), torch.full((3, spec.patches), MARKER), texts(3, 5)], 1)
    return {"pixel_values": pictures(spec.vision), "input_ids": tokens}


def theirs_of(out: Any) -> Tensor:
    names = ("logits", "logits_per_image", "pooler_output")
    return next(getattr(out, name) for name in names if getattr(out, name, None) is not None)


def ours_of(model: nn.Module, given: dict[str, Tensor], layout: TokenLayout | None = None) -> Tensor:
    match model.spec:
        case Encoder():
            return model(given["pixel_values"])
        case DualEncoder():
            return model(given["pixel_values"], given["input_ids"], layout)
        case _:
            return model(given["input_ids"], layout, images=given["pixel_values"])


def losses(pair: Pair, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Ours and theirs; where theirs has none, any function of what is said."""
    said, spec = ours_of(pair.ours, given), pair.ours.spec
    if isinstance(spec, DualEncoder):
        found = LOSSES["softmax" if spec.bias is None else "sigmoid"](said, torch.arange(3)) / 3
        return found, pair.theirs(**given, return_loss=True).loss
    if isinstance(spec, Interleaved):
        labels = given["input_ids"].masked_fill(given["input_ids"] == MARKER, -100)
        return F.cross_entropy(said[:, :-1].mT, labels[:, 1:]), pair.theirs(**given, labels=labels).loss
    if hasattr(pair.theirs, "classifier"):
        labels = torch.tensor([0, 1, 1])
        return F.cross_entropy(said, labels), pair.theirs(**given, labels=labels).loss
    return said.sin().sum(), theirs_of(pair.theirs(**given)).sin().sum()


@contextmanager
def watched(encoder: nn.Module) -> Iterator[list[Tensor]]:
    """What stands at the foot of a stack, and behind each block of it."""
    seen: list[Tensor] = []
    hooks = [encoder.stack.input.register_forward_hook(lambda _, __, out: seen.append(out))]
    hooks += [block.register_forward_hook(lambda _, __, out: seen.append(out[0])) for block in encoder.stack.blocks]
    yield seen
    for hook in hooks:
        hook.remove()


def stacks(pair: Pair, out: Any) -> dict[nn.Module, tuple[Any, Any]]:
    """Our stacks, each with what stands at the foot and behind the blocks of theirs, and with the tokens to compare."""
    ours = pair.ours
    if isinstance(ours.spec, Encoder):
        return {ours: (out.hidden_states, ...)}
    if isinstance(ours.spec, Interleaved):
        return {ours.decoder: (out.hidden_states[:-1], ...)}  # their last is normed
    read = ... if ours.spec.end is None else torch.arange(9) <= torch.tensor(ENDS)[:, None]  # nobody reads the rest
    seen, said = out.vision_model_output.hidden_states, out.text_model_output.hidden_states
    return {ours.image: (seen, ...), ours.text: (said, read)}


@pytest.mark.ledger("vit.patch", "mm.clip", "mm.interleave")
@torch.no_grad()
def test_what_is_said_and_every_hidden_state(pair: Pair) -> None:
    given = inputs(pair.ours.spec)
    out = pair.theirs(**given, output_hidden_states=True)
    assert error(ours_of(pair.ours, given), theirs_of(out)) <= LIMIT
    for stack, (expected, read) in stacks(pair, out).items():
        with watched(stack) as seen:
            ours_of(pair.ours, given)
        for found, wanted in zip(seen[: len(expected)], expected, strict=True):
            assert error(found[read], wanted[read]) <= LIMIT


@torch.no_grad()
def test_what_is_seen_of_images_among_words(reader: Pair) -> None:
    images, spec = pictures(reader.ours.spec.vision), reader.ours.spec
    expected = reader.theirs.get_image_features(images).pooler_output
    found = reader.ours.projector(reader.ours.look(images)[0][:, -spec.patches :])
    assert error(found, torch.stack(tuple(expected))) <= LIMIT


@pytest.mark.ledger("vit.patch", "mm.clip", "mm.interleave")
def test_loss_and_gradients(pair: Pair, tmp_path: Path) -> None:
    pair.theirs.zero_grad()
    pair.ours.zero_grad()
    loss, expected = losses(pair, inputs(pair.ours.spec))
    assert error(loss, expected) <= LIMIT
    expected.backward()
    loss.backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in pair.ours.named_parameters()}
    found = dict(family(pair.model_type).table(pair.ours.spec).write(gradients))
    expected = kept(stored_gradients(pair.theirs, tmp_path))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert error(found[name], gradient) <= LIMIT, name


def kept(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """All but what stood for hidden patches when DINOv2 was trained."""
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("mask_token")}


@torch.no_grad()
def test_exported_it_is_the_same_model_there(pair: Pair, tmp_path: Path) -> None:
    export(pair.ours, tmp_path / "out", pair.model_type)
    back, told = type(pair.theirs).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values()), told
    given = inputs(pair.ours.spec)
    assert torch.equal(theirs_of(back(**given)), theirs_of(pair.theirs(**given)))
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", pair.folder))
    assert ours.keys() == kept(theirs).keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@torch.no_grad()
def test_saved_and_loaded_it_is_bit_identical(pair: Pair, tmp_path: Path) -> None:
    save(pair.ours, tmp_path / "own")
    again = load(tmp_path / "own")
    assert again.spec == pair.ours.spec
    expected = pair.ours.state_dict()
    assert again.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())


def test_the_config_comes_back(pair: Pair) -> None:
    foreign = family(pair.model_type)
    written = foreign.config(pair.ours.spec)
    assert written["architectures"] == [type(pair.theirs).__name__]
    assert canonical(foreign.spec(written)) == canonical(pair.ours.spec)
    assert foreign.spec(json.loads((pair.folder / "config.json").read_text())) == pair.ours.spec


@pytest.mark.slow
def test_it_keeps_every_law(pair: Pair) -> None:
    broken = [verdict for verdict in verify(pair.ours, 24, 0) if verdict.result == "FAIL"]
    assert not broken, broken


@torch.no_grad()
def test_texts_of_a_pair_may_be_padded(dual: Pair) -> None:
    """CLIP's behind their end, with ends if need be; SigLIP's on the left: theirs reads the last place anyhow."""
    given, spec = inputs(dual.ours.spec), dual.ours.spec
    if spec.end is None:
        layout = places([4, 9, 6], 9, left=True)
        theirs = dual.theirs(**given, attention_mask=layout.valid.long(), position_ids=layout.positions)
    else:
        layout = places([5, 9, 7], 9)
        theirs = dual.theirs(**given, attention_mask=layout.valid.long())
        behind = given | {"input_ids": given["input_ids"].masked_fill(~layout.valid, END)}
        assert error(ours_of(dual.ours, behind), theirs.logits_per_image) <= LIMIT
    assert error(ours_of(dual.ours, given, layout), theirs.logits_per_image) <= LIMIT


@pytest.mark.ledger("mm.interleave")
@torch.no_grad()
def test_prompts_with_images_padded_on_either_side(reader: Pair) -> None:
    """None, one and two images a row, among words."""
    spec = reader.ours.spec
    image = torch.full((1, spec.patches), MARKER)
    rows = [texts(1, 4), torch.cat([texts(1, 1), image, texts(1, 3)], 1), torch.cat([image, texts(1, 2), image], 1)]
    longest = max(row.shape[1] for row in rows)
    for left in (False, True):
        layout = places([row.shape[1] for row in rows], longest, left)
        tokens = torch.zeros(3, longest, dtype=torch.int64)
        for row, alone in enumerate(rows):
            tokens[row, layout.valid[row]] = alone[0]
        given = {"pixel_values": pictures(spec.vision), "input_ids": tokens}
        theirs = reader.theirs(**given, attention_mask=layout.valid.long(), position_ids=layout.positions).logits
        assert error(ours_of(reader.ours, given, layout)[layout.valid], theirs[layout.valid]) <= LIMIT


@pytest.mark.ledger("mm.interleave", "kv.cache")
@torch.no_grad()
def test_forty_greedy_tokens_about_an_image_with_a_cache(reader: Pair) -> None:
    given = inputs(reader.ours.spec)
    prompt = given["input_ids"]
    length = prompt.shape[1]
    mask = torch.ones_like(prompt)
    expected = reader.theirs.generate(**given, attention_mask=mask, max_new_tokens=40, do_sample=False)
    store = Contiguous(reader.ours.spec.memory(), 3, length + 40, torch.float32)
    said = reader.ours(
        prompt, now := TokenLayout(torch.arange(length).expand(3, -1)), store.begin_forward(now), given["pixel_values"]
    )
    text = prompt
    for place in range(length, length + 40):
        new = said[:, -1:].argmax(-1)
        text = torch.cat([text, new], 1)
        said = reader.ours.decoder(new, now := TokenLayout(torch.full((3, 1), place)), store.begin_forward(now))
    assert torch.equal(text, expected)
    assert len(text[:, length:].unique()) > 5, "a model that repeats itself proves little"
    assert not torch.equal(text[0, length:], text[1, length:]), "every image must be told of by itself"


@torch.no_grad()
def test_files_of_older_versions_are_read(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Their vision towers have one more word in their names, and places are stored beside the weights."""
    for name, (old, new) in {
        "LlavaForConditionalGeneration: last layer but one": ("vision_tower.", "vision_tower.vision_model."),
        "CLIPModel: two widths": ("", ""),
    }.items():
        pair = make(CASES[name], tmp_path_factory.mktemp("theirs"))
        tensors = load_file(pair.folder / "model.safetensors")
        renamed = {new + key.removeprefix(old) if key.startswith(old) else key: t for key, t in tensors.items()}
        renamed[f"{new or 'vision_model.'}embeddings.position_ids"] = torch.arange(10)[None]
        save_file(renamed, pair.folder / "model.safetensors")
        again = load(pair.folder)
        given = inputs(again.spec)
        assert torch.equal(ours_of(again, given), ours_of(pair.ours, given))
