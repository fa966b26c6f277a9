"""Vision models equal those of `transformers`: outputs, hidden states, gradients, padding, greedy tokens, export.

They are image encoders, dual encoders of images and text, and decoders of images interleaved with text.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from regard.checkpoint import export, load
from regard.engine.stores.contiguous import Contiguous
from regard.families import family
from regard.families.common.roundtrip import canonical
from regard.layout import TokenLayout
from regard.models.dual_encoder import DualEncoder
from regard.models.encoder import Encoder
from regard.models.interleaved import Interleaved
from regard.objectives.contrastive import LOSSES
from tests.families.cases import one_per_class, params
from tests.families.cases.vision import CASES, DINO, DUAL_ENCODERS, END_TOKEN, IMAGE_TOKEN, INTERLEAVED
from tests.families.pairs import (
    LIMIT,
    Pair,
    check_laws,
    check_saved_and_loaded,
    make_pair,
    our_gradients,
    record_hidden_states,
    stored_gradients,
)
from tests.laws import assert_equal_weights, error, layout_with_padding

ENDS = (4, 8, 6)  # positions of the end token in three sequences of nine tokens


@pytest.fixture(scope="module", params=params(CASES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(request.param, tmp_path_factory.mktemp("theirs"))


@pytest.fixture(scope="module", params=params(DUAL_ENCODERS))
def dual_encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(request.param, tmp_path_factory.mktemp("theirs"))


@pytest.fixture(scope="module", params=params(INTERLEAVED))
def interleaved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(request.param, tmp_path_factory.mktemp("theirs"))


def random_images(spec: Encoder, count: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, spec.input.channels, *spec.input.image, generator=generator)


def random_tokens(*shape: int) -> Tensor:
    """Random ids other than the image token and the end token."""
    return torch.randint(IMAGE_TOKEN + 1, END_TOKEN, shape, generator=torch.Generator().manual_seed(5))


def inputs(spec: Any) -> dict[str, Tensor]:
    """Arguments for transformers: three images, and three token sequences unless the model is an image encoder."""
    if isinstance(spec, Encoder):
        return {"pixel_values": random_images(spec)}
    if isinstance(spec, DualEncoder):
        tokens = random_tokens(3, 9)
        tokens[range(3), ENDS] = END_TOKEN
        return {"pixel_values": random_images(spec.image), "input_ids": tokens}
    tokens = torch.cat([random_tokens(3, 2), torch.full((3, spec.patches), IMAGE_TOKEN), random_tokens(3, 5)], 1)
    return {"pixel_values": random_images(spec.vision), "input_ids": tokens}


def their_output(out: Any) -> Tensor:
    names = ("logits", "logits_per_image", "pooler_output")
    return next(getattr(out, name) for name in names if getattr(out, name, None) is not None)


def our_output(model: nn.Module, batch: dict[str, Tensor], layout: TokenLayout | None = None) -> Tensor:
    match model.spec:
        case Encoder():
            return model(batch["pixel_values"])
        case DualEncoder():
            return model(batch["pixel_values"], batch["input_ids"], layout)
        case _:
            return model(batch["input_ids"], layout, images=batch["pixel_values"])


def losses(pair: Pair, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Our loss and that of transformers; for a class without a loss, the sum of the sines of its output."""
    output, spec = our_output(pair.ours, batch), pair.ours.spec
    if isinstance(spec, DualEncoder):
        found = LOSSES["softmax" if spec.bias is None else "sigmoid"](output, torch.arange(3)) / 3
        return found, pair.theirs(**batch, return_loss=True).loss
    if isinstance(spec, Interleaved):
        labels = batch["input_ids"].masked_fill(batch["input_ids"] == IMAGE_TOKEN, -100)
        return F.cross_entropy(output[:, :-1].mT, labels[:, 1:]), pair.theirs(**batch, labels=labels).loss
    if hasattr(pair.theirs, "classifier"):
        labels = torch.tensor([0, 1, 1])
        return F.cross_entropy(output, labels), pair.theirs(**batch, labels=labels).loss
    return output.sin().sum(), their_output(pair.theirs(**batch)).sin().sum()


def hidden_states(pair: Pair, out: Any) -> dict[nn.Module, tuple[Any, Any]]:
    """For each of our models with a stack: the hidden states of transformers, and an index of the tokens to compare."""
    ours = pair.ours
    if isinstance(ours.spec, Encoder):
        return {ours: (out.hidden_states, ...)}
    if isinstance(ours.spec, Interleaved):
        return {ours.decoder: (out.hidden_states[:-1], ...)}  # without the last, which is after the final norm
    until_end = ... if ours.spec.end is None else torch.arange(9) <= torch.tensor(ENDS)[:, None]
    image, text = out.vision_model_output.hidden_states, out.text_model_output.hidden_states
    return {ours.image: (image, ...), ours.text: (text, until_end)}


@pytest.mark.ledger("vit.patch", "mm.clip", "mm.interleave")
@torch.no_grad()
def test_outputs_and_hidden_states_equal_transformers(pair: Pair) -> None:
    batch = inputs(pair.ours.spec)
    out = pair.theirs(**batch, output_hidden_states=True)
    assert error(our_output(pair.ours, batch), their_output(out)) <= LIMIT
    for model, (expected, index) in hidden_states(pair, out).items():
        with record_hidden_states(model.stack) as states:
            our_output(pair.ours, batch)
        for found, reference in zip(states[: len(expected)], expected, strict=True):
            assert error(found[index], reference[index]) <= LIMIT


@torch.no_grad()
def test_projected_image_features_equal_transformers(interleaved: Pair) -> None:
    images, spec = random_images(interleaved.ours.spec.vision), interleaved.ours.spec
    expected = interleaved.theirs.get_image_features(images).pooler_output
    found = interleaved.ours.projector(interleaved.ours.image_features(images)[0][:, -spec.patches :])
    assert error(found, torch.stack(tuple(expected))) <= LIMIT


@pytest.mark.ledger("vit.patch", "mm.clip", "mm.interleave")
def test_loss_and_gradients_equal_transformers(pair: Pair, tmp_path: Path) -> None:
    pair.theirs.zero_grad()
    pair.ours.zero_grad()
    loss, expected = losses(pair, inputs(pair.ours.spec))
    assert error(loss, expected) <= LIMIT
    expected.backward()
    loss.backward()
    found, expected = our_gradients(pair), without_mask_token(stored_gradients(pair.theirs, tmp_path))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert error(found[name], gradient) <= LIMIT, name


def without_mask_token(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """DINOv2 stores the vector that replaced masked patches in its training; we do not."""
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("mask_token")}


@torch.no_grad()
def test_exported_model_is_equal_in_transformers(pair: Pair, tmp_path: Path) -> None:
    export(pair.ours, tmp_path / "out", pair.model_type)
    reloaded, report = type(pair.theirs).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    batch = inputs(pair.ours.spec)
    assert error(their_output(reloaded(**batch)), their_output(pair.theirs(**batch))) <= LIMIT
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", pair.folder))
    assert ours.keys() == without_mask_token(theirs).keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_saved_and_loaded_is_bit_identical(pair: Pair, tmp_path: Path) -> None:
    check_saved_and_loaded(pair, tmp_path / "saved")


def test_config_and_spec_round_trip(pair: Pair) -> None:
    module = family(pair.model_type)
    written = module.config(pair.ours.spec)
    assert written["architectures"] == [type(pair.theirs).__name__]
    assert canonical(module.spec(written)) == canonical(pair.ours.spec)
    assert module.spec(json.loads((pair.folder / "config.json").read_text())) == pair.ours.spec


@pytest.mark.slow
@pytest.mark.parametrize("pair", one_per_class(CASES), indirect=True)
def test_laws_hold(pair: Pair) -> None:
    check_laws(pair)


@torch.no_grad()
def test_padded_text_of_dual_encoders_equals_transformers(dual_encoder: Pair) -> None:
    """CLIP pads with any ids after the end token; SigLIP pools the last position, so it is padded on the left."""
    batch, spec = inputs(dual_encoder.ours.spec), dual_encoder.ours.spec
    if spec.end is None:
        layout = layout_with_padding([4, 9, 6], 9, left=True)
        theirs = dual_encoder.theirs(**batch, attention_mask=layout.valid.long(), position_ids=layout.positions)
    else:
        layout = layout_with_padding([5, 9, 7], 9)
        theirs = dual_encoder.theirs(**batch, attention_mask=layout.valid.long())
        padded = batch | {"input_ids": batch["input_ids"].masked_fill(~layout.valid, END_TOKEN)}
        assert error(our_output(dual_encoder.ours, padded), theirs.logits_per_image) <= LIMIT
    assert error(our_output(dual_encoder.ours, batch, layout), theirs.logits_per_image) <= LIMIT


@pytest.mark.ledger("mm.interleave")
@torch.no_grad()
def test_padded_prompts_with_images_equal_transformers(interleaved: Pair) -> None:
    """The rows have no image, one image and two images."""
    spec = interleaved.ours.spec
    image = torch.full((1, spec.patches), IMAGE_TOKEN)
    rows = [
        random_tokens(1, 4),
        torch.cat([random_tokens(1, 1), image, random_tokens(1, 3)], 1),
        torch.cat([image, random_tokens(1, 2), image], 1),
    ]
    longest = max(row.shape[1] for row in rows)
    for left in (False, True):
        layout = layout_with_padding([row.shape[1] for row in rows], longest, left)
        tokens = torch.zeros(3, longest, dtype=torch.int64)
        for row, row_tokens in enumerate(rows):
            tokens[row, layout.valid[row]] = row_tokens[0]
        batch = {"pixel_values": random_images(spec.vision), "input_ids": tokens}
        theirs = interleaved.theirs(**batch, attention_mask=layout.valid.long(), position_ids=layout.positions).logits
        assert error(our_output(interleaved.ours, batch, layout)[layout.valid], theirs[layout.valid]) <= LIMIT


@pytest.mark.ledger("mm.interleave", "kv.cache")
@torch.no_grad()
def test_forty_greedy_tokens_after_an_image_equal_transformers(interleaved: Pair) -> None:
    batch = inputs(interleaved.ours.spec)
    prompt = batch["input_ids"]
    length = prompt.shape[1]
    mask = torch.ones_like(prompt)
    expected = interleaved.theirs.generate(**batch, attention_mask=mask, max_new_tokens=40, do_sample=False)
    store = Contiguous(interleaved.ours.spec.memory(), 3, length + 40, torch.float32)
    logits = interleaved.ours(
        prompt,
        layout := TokenLayout(torch.arange(length).expand(3, -1)),
        store.begin_forward(layout),
        batch["pixel_values"],
    )
    ids = prompt
    for position in range(length, length + 40):
        new = logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, new], 1)
        logits = interleaved.ours.decoder(
            new, layout := TokenLayout(torch.full((3, 1), position)), store.begin_forward(layout)
        )
    assert torch.equal(ids, expected)
    assert len(ids[:, length:].unique()) > 5, "a model that repeats itself is a weak test"
    assert not torch.equal(ids[0, length:], ids[1, length:]), "different images must lead to different tokens"


@torch.no_grad()
def test_files_of_transformers_4_are_read(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The names of their vision towers have one more component, and position ids are stored."""
    for name, (old, new) in {
        "LlavaForConditionalGeneration: penultimate layer": ("vision_tower.", "vision_tower.vision_model."),
        "CLIPModel: two widths": ("", ""),
    }.items():
        pair = make_pair(CASES[name], tmp_path_factory.mktemp("theirs"))
        tensors = load_file(pair.folder / "model.safetensors")
        renamed = {new + key.removeprefix(old) if key.startswith(old) else key: t for key, t in tensors.items()}
        renamed[f"{new or 'vision_model.'}embeddings.position_ids"] = torch.arange(10)[None]
        save_file(renamed, pair.folder / "model.safetensors")
        reloaded = load(pair.folder)
        batch = inputs(reloaded.spec)
        assert_equal_weights(reloaded, pair.ours)
        assert error(our_output(reloaded, batch), our_output(pair.ours, batch)) <= LIMIT


@pytest.mark.parametrize("size", [(20, 20), (8, 8), (12, 24), (15, 29)])
@torch.no_grad()
def test_interpolated_positions_equal_transformers(size: tuple[int, int], tmp_path: Path) -> None:
    """DINOv2 is published for images of 518 × 518 and mostly used with 224 × 224."""
    for model in ("Dinov2Model", "Dinov2ForImageClassification"):
        settings = DINO | {"image_size": 12, "patch_size": 4}
        pair = make_pair((model, settings), tmp_path / model)
        images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(5))
        assert error(our_output(pair.ours, {"pixel_values": images}), their_output(pair.theirs(images))) <= LIMIT
