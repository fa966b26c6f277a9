"""Images and text: two encoders with one embedding space (CLIP), and patches between tokens of a decoder (LLaVA)."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.engine.stores.contiguous import Contiguous
from regard.engine.stores.paged import Paged
from regard.kernels.attention.mask import Full
from regard.layout import TokenLayout
from regard.models.base import build_on_meta
from regard.models.decoder import Decoder
from regard.models.dual_encoder import DualEncoder
from regard.models.encoder import Encoder
from regard.models.heads import Pooled
from regard.models.interleaved import Interleaved, Projector
from regard.models.presets import clip, vit
from regard.models.stack import Repeat
from regard.objectives.contrastive import Contrastive
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.experts import Experts
from regard.parts.feedforward import FeedForward, SwiGLU
from regard.parts.input import Tokens
from regard.parts.norm import LayerNorm
from regard.parts.patches import Patches
from regard.parts.position.learned import Learned
from regard.parts.position.rope import Rope
from regard.spec import SpecError
from tests.laws import VOCAB, WIDTH, error, layout_with_padding, random_ids, randomize_weights
from tests.models.reference_weights import PROJECTIONS, fill, randomized, renamed

SMALL = {
    "image": 8, "patch": 4, "width": 24, "heads": 4, "layers": 2, "vocab": VOCAB, "length": 12,
    "text_width": 16, "text_heads": 2, "dim": 10,
}  # fmt: skip
CLIP = {
    r"^logit_scale": "scale",
    r"^text_model\.embeddings\.token_embedding\.": "text.input.table.",
    r"^(text|vision)_model\.embeddings\.position_embedding\.": r"\1.position.table.",
    r"^text_model\.final_layer_norm\.": "text.norm.",
    r"^vision_model\.embeddings\.class_embedding": "image.input.cls",
    r"^vision_model\.embeddings\.patch_embedding\.": "image.input.proj.",
    r"^vision_model\.pre_layrnorm\.": "image.embedding_norm.",
    r"^vision_model\.post_layernorm\.": "image.norm.",
    r"^(text|vision)_model\.encoder\.layers\.": r"\1.stack.blocks.",
    r"^vision\.": "image.",
    r"^visual_projection\.": "image.head.proj.",
    r"^text_projection\.": "text.head.proj.",
    **PROJECTIONS,
}
EOS = VOCAB - 1


def random_images(count: int, side: int = 8, seed: int = 3) -> Tensor:
    return torch.randn(count, 3, side, side, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.ledger("mm.clip")
def test_clip_equals_transformers() -> None:
    """Logits, loss and gradients; CLIP locates the end token by its id, our model by its position."""
    import transformers

    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": VOCAB}
    ids = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": EOS}
    text_config = {"hidden_size": 16, "max_position_embeddings": 12, **sizes, **ids}
    vision_config = {
        "hidden_size": 24,
        "image_size": 8,
        "patch_size": 4,
        "intermediate_size": 96,
        "num_attention_heads": 4,
    }
    config = transformers.CLIPConfig(
        text_config=text_config, vision_config=vision_config | {"num_hidden_layers": 2}, projection_dim=10
    )
    theirs = randomized(transformers.CLIPModel(config))
    ours = fill(clip(**SMALL).build(), renamed(dict(theirs.named_parameters()), CLIP))
    lengths = [3, 9, 6]
    layout, tokens = layout_with_padding(lengths, 9), random_ids(3, 9) % EOS
    for row, length in enumerate(lengths):
        tokens[row, length - 1] = EOS
    out = theirs(tokens, random_images(3), attention_mask=layout.valid.long(), return_loss=True)
    found = ours(random_images(3), tokens, layout)
    assert error(found, out.logits_per_image) <= 1e-12
    batch = Batch(images=random_images(3), tokens=tokens, valid=layout.valid)
    loss, count, metrics = Contrastive()(ours, batch)
    assert error(loss / count, out.loss) <= 1e-12
    assert metrics["accuracy"] == (found.argmax(-1) == torch.arange(3)).sum()
    (loss / count).backward()
    out.loss.backward()
    expected_gradients = renamed({name: p.grad for name, p in theirs.named_parameters()}, CLIP)
    for name, parameter in ours.named_parameters():
        assert error(parameter.grad, expected_gradients[name].reshape(parameter.shape)) <= 1e-9, name


@pytest.mark.ledger("mm.clip")
def test_clip_has_its_published_size() -> None:
    assert sum(p.numel() for p in build_on_meta(clip()).parameters()) == 151_277_313


def test_logits_are_cosine_similarities_over_the_temperature() -> None:
    model = randomized(replace(clip(**SMALL), temperature=0.5, bias=-3.0).build(0))
    assert DualEncoder.from_json(model.spec.to_json()) == model.spec
    images, tokens = random_images(2), random_ids(3, 5)
    found = model(images, tokens)
    assert found.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            a, b = model.image(images[i : i + 1])[0], model.text(tokens[j : j + 1])[0]
            cosine = (a @ b) / (a.norm() * b.norm())
            assert error(found[i, j], model.scale.exp() * cosine + model.bias) <= 1e-12
    untrained = replace(clip(**SMALL), temperature=0.5, bias=-3.0).build(0)
    assert abs(untrained.scale.exp().item() - 2.0) < 1e-6 and untrained.bias.item() == -3.0


VISION = Encoder(
    Patches((4, 4), (8, 8), registers=1),
    16,
    (Repeat((Block((Sublayer(Attention(2, mask=Full(), bias=True)), Sublayer(FeedForward(24)))),), 2),),
    Learned(6),
)
LANGUAGE = Decoder(
    VOCAB, WIDTH, (Repeat((Block((Sublayer(Attention(4, 2, position=Rope())), Sublayer(SwiGLU(40)))),), 2),)
)
SPECS = {
    "rope": Interleaved(VISION, LANGUAGE, marker=5),
    "learned positions, a wide projector": Interleaved(
        VISION,
        Decoder(
            VOCAB,
            WIDTH,
            (Repeat((Block((Sublayer(Attention(4), LayerNorm()),)),)),),
            Learned(32),
            embedding_scale=2.0,
        ),
        marker=5,
        projector=Projector(40, "relu"),
    ),
}
STORES = {
    "contiguous": lambda spec: Contiguous(spec.memory(), 2, 32, torch.float64),
    "paged": lambda spec: Paged(spec.memory(), 2, 32, torch.float64, block=4, blocks=16),
}


def build(spec: Interleaved) -> nn.Module:
    model = spec.build(seed=0).double().eval().requires_grad_(False)
    randomize_weights(model, seed=1)
    return model


def prompt(spec: Interleaved, *ids: int) -> Tensor:
    return torch.tensor([spec.expand(ids)])


@pytest.mark.ledger("mm.interleave")
def test_a_marker_is_expanded_to_one_token_per_patch() -> None:
    spec = SPECS["rope"]
    assert spec.patches == 4  # [CLS] and the register are not passed to the decoder
    assert spec.expand([1, 5, 2, 5]) == [1, 5, 5, 5, 5, 2, 5, 5, 5, 5]


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.ledger("mm.interleave")
def test_patches_replace_the_embeddings_of_markers(name: str) -> None:
    """Equal to the decoder applied to embeddings that are replaced in a loop."""
    model, images = build(SPECS[name]), random_images(2)
    decoder, tokens = model.decoder, prompt(SPECS[name], 1, 5, 2, 3, 5, 7)
    patches = model.projector(model.vision.encode(images)[0].x[:, 2:]).flatten(0, 1)
    rows, used = [], 0
    for token in tokens[0]:
        if token == 5:
            rows.append(patches[used])
            used += 1
        else:
            rows.append(decoder.embedding.weight[token] * decoder.spec.embedding_scale)
    layout = TokenLayout.whole(*tokens.shape)
    x, _ = decoder.stack(decoder.position.embed(torch.stack(rows).unsqueeze(0), layout), layout)
    assert used == 8
    assert error(model(tokens, images=images), decoder.logits(decoder.norm(x))) <= 1e-12


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("kind", STORES)
@pytest.mark.ledger("mm.interleave")
def test_cached_equals_whole(name: str, kind: str) -> None:
    """The prompt starts with an image; the later tokens are computed one by one, by the decoder only."""
    model, images = build(SPECS[name]), random_images(2)
    text_ids = random_ids(2, 6) % 5  # no markers
    tokens = torch.cat([torch.full((2, 4), 5), text_ids], 1)
    store = STORES[kind](model.spec)
    assert all(store.reserve(row, 32) for row in range(2))
    found = [
        model(tokens[:, :5], layout := TokenLayout(torch.arange(5).expand(2, 5)), store.begin_forward(layout), images)
    ]
    for t in range(5, 10):
        found.append(
            model(tokens[:, t : t + 1], layout := TokenLayout(torch.tensor([[t], [t]])), store.begin_forward(layout))
        )
    assert error(torch.cat(found, 1), model(tokens, images=images)) <= 1e-9


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_padded_batch_equals_each_alone(name: str, left: bool) -> None:
    """The rows have no image, one image and two images."""
    model, images, spec = build(SPECS[name]), random_images(3), SPECS[name]
    prompts = [prompt(spec, 1, 2, 3), prompt(spec, 5, 1), prompt(spec, 2, 5, 3, 5)]
    image_indices = [[], [0], [1, 2]]
    layout = layout_with_padding([row.shape[1] for row in prompts], 10, left)
    tokens = torch.zeros(3, 10, dtype=torch.int64)
    for row, ids in enumerate(prompts):
        tokens[row, layout.valid[row]] = ids[0]
    found = model(tokens, layout, images=images)
    for row, ids in enumerate(prompts):
        expected = model(ids, images=images[image_indices[row]] if image_indices[row] else None)
        assert error(found[row, layout.valid[row]], expected[0]) <= 1e-9


@pytest.mark.parametrize("name", SPECS)
def test_packed_equals_separate(name: str) -> None:
    model, images, spec = build(SPECS[name]), random_images(2), SPECS[name]
    first, second = prompt(spec, 1, 5, 2), prompt(spec, 5, 3)
    positions = torch.cat([torch.arange(6), torch.arange(5)]).unsqueeze(0)
    segments = torch.tensor([[0] * 6 + [1] * 5])
    packed = model(torch.cat([first, second], 1), TokenLayout(positions, segments, consecutive=True), images=images)
    separate = [model(first, images=images[:1]), model(second, images=images[1:])]
    assert error(packed, torch.cat(separate, 1)) <= 1e-9


def test_features_are_taken_from_intermediate_blocks() -> None:
    """Outputs of the selected blocks are concatenated before the final norm; whole=True keeps [CLS] and registers."""
    spec = replace(SPECS["rope"], features=(-2, 2, 0), whole=True)
    model, images = build(spec), random_images(2)
    hidden: list[Tensor] = []
    vision = model.vision
    hooks = [vision.stack.input.register_forward_hook(lambda _, __, out: hidden.append(out))]
    hooks += [block.register_forward_hook(lambda _, __, out: hidden.append(out[0])) for block in vision.stack.blocks]
    vision.encode(images)
    for hook in hooks:
        hook.remove()
    assert (spec.depths, spec.patches) == ((1, 2, 0), 6)
    assert error(model.image_features(images)[0], torch.cat([hidden[1], hidden[2], hidden[0]], -1)) <= 1e-12
    assert model(prompt(spec, 1, 5, 2), images=images[:1]).shape == (1, 8, VOCAB)
    with pytest.raises(SpecError, match=r"features=\(-4,\) exceeds the 2 blocks"):
        build(replace(spec, features=(-4,))).image_features(images)


def test_a_text_ends_at_its_first_end_token() -> None:
    """Tokens after the first end token are ignored, with padding on either side."""
    model = randomized(replace(clip(**SMALL), end=EOS).build(0))
    text_ids = torch.tensor([[1, 2, 3, EOS]])
    expected = model(random_images(2), text_ids)
    with_suffix = torch.cat([text_ids, torch.tensor([[EOS, 4, EOS]])], 1)
    assert error(model(random_images(2), with_suffix), expected) <= 1e-12
    left_padded = torch.cat([torch.tensor([[EOS, EOS]]), text_ids], 1)
    assert error(model(random_images(2), left_padded, layout_with_padding([4], 6, left=True)), expected) <= 1e-12
    unterminated, without_end = text_ids[:, :3], randomized(clip(**SMALL).build(0))
    assert error(model(random_images(2), unterminated), without_end(random_images(2), unterminated)) <= 1e-12


def test_text_attends_to_the_image_and_the_image_not_to_later_text() -> None:
    model, spec = build(SPECS["rope"]), SPECS["rope"]
    tokens, other_tokens = prompt(spec, 1, 5, 2, 3), prompt(spec, 1, 5, 2, 4)
    image, other_image = random_images(1), random_images(1, seed=4)
    assert torch.equal(model(tokens, images=image)[:, :-1], model(other_tokens, images=image)[:, :-1])
    assert torch.equal(model(tokens, images=image)[:, 0], model(tokens, images=other_image)[:, 0])
    assert not torch.allclose(model(tokens, images=image)[:, -1], model(tokens, images=other_image)[:, -1])


def test_every_weight_gets_a_gradient() -> None:
    model, spec = build(SPECS["rope"]).requires_grad_(), SPECS["rope"]
    model(prompt(spec, 1, 5, 2, 3), images=random_images(1)).sin().sum().backward()
    for name, parameter in model.named_parameters():
        unused = name.endswith("k_proj.bias")  # adds the same number to all scores of a query
        assert parameter.grad.isfinite().all() and (parameter.grad.any() or unused), name


@pytest.mark.ledger("mm.interleave")
def test_losses_of_experts_in_the_vision_encoder_reach_the_outputs() -> None:
    """Auxiliary losses of all stacks are in the outputs, and the objective adds them."""
    experts = Block((Sublayer(Experts(4, 2, SwiGLU(8))),))
    vision = replace(VISION, layers=(Repeat((experts,)),))
    spec = Interleaved(vision, LANGUAGE, marker=3)
    model = spec.build(seed=0).train()
    assert list(model(prompt(spec, 1, 3, 2), images=random_images(1).float(), outputs=True).losses) == ["balance"]
    head = Pooled("last", 4)
    dual_encoder = DualEncoder(replace(vision, head=head), replace(TEXT, head=head, layers=vision.layers))
    batch = Batch(images=random_images(2).float(), tokens=torch.tensor([[1, 2], [3, 4]]))
    loss, count, metrics = Contrastive()(dual_encoder.build(seed=0).train(), batch)
    without_balance, *_ = Contrastive()(dual_encoder.build(seed=0).eval(), batch)
    assert metrics["balance"] > 0
    assert torch.isclose(loss, without_balance + metrics["balance"])


def test_a_number_of_markers_that_does_not_fit_the_images_is_refused() -> None:
    model, spec = build(SPECS["rope"]), SPECS["rope"]
    with pytest.raises(ValueError, match="4 marker tokens, but 2 images have 4 patches each"):
        model(prompt(spec, 1, 5), images=random_images(2))
    with pytest.raises(ValueError, match="4 marker tokens, but 0 images"):
        model(prompt(spec, 1, 5))


TEXT = Encoder(Tokens(5), 16, VISION.layers, head=Pooled("last", 4))
REFUSED = {
    "vision encoder is tokens; use Patches": lambda: Interleaved(replace(TEXT, head=None), LANGUAGE, 5),
    "head, whose output is not used": lambda: Interleaved(vit(**{"image": 8, "patch": 4, "width": 24}), LANGUAGE, 5),
    "projector: hidden=0 must be positive": lambda: Projector(0),
    "marker=31 is not in the vocabulary": lambda: Interleaved(VISION, LANGUAGE, 31),
    "image embeddings have 16 dimensions and text embeddings 4": lambda: DualEncoder(
        replace(VISION, head=Pooled("cls")), TEXT
    ),
    "the image encoder needs a head with normalized embeddings": lambda: DualEncoder(VISION, TEXT),
    "temperature=0.0 must be positive": lambda: replace(clip(**SMALL), temperature=0.0),
    "end=-1 must not be negative": lambda: replace(clip(**SMALL), end=-1),
}


@pytest.mark.parametrize("message", REFUSED)
def test_wrong_specs_are_refused(message: str) -> None:
    with pytest.raises(SpecError, match=message):
        REFUSED[message]()
