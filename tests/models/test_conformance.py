"""Models of `transformers` built from our parts, with the same weights: T5, and images in a decoder (LLaVA)."""

import pytest
import torch

from regard.engine.stores.contiguous import Contiguous
from regard.kernels.attention.mask import Full
from regard.layout import TokenLayout
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.interleaved import Interleaved
from regard.models.presets import pre_norm_block
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.cross_attention import CrossAttention
from regard.parts.feedforward import FeedForward, SwiGLU
from regard.parts.input import Tokens
from regard.parts.norm import LayerNorm, RMSNorm
from regard.parts.patches import Patches
from regard.parts.position.learned import Learned
from regard.parts.position.rope import Rope
from regard.parts.position.t5 import T5Buckets
from tests.laws import error, layout_with_padding, random_ids
from tests.models.reference_weights import PROJECTIONS, fill, randomized, renamed

VOCAB, MARKER = 31, 5
T5 = {
    r"^shared\.": "source.input.table.",
    r"^encoder\.block\.": "source.stack.blocks.",
    r"^decoder\.block\.": "target.stack.blocks.",
    r"^(source|target)\S*SelfAttention\.relative_attention_bias\.": r"\1.position.table.",
    r"^encoder\.final_layer_norm\.": "source.norm.",
    r"^decoder\.final_layer_norm\.": "target.norm.",
    r"\.layer\.(\d)\.(?:SelfAttention|EncDecAttention)\.([qkvo])\.": r".sublayers.\1.body.\2_proj.",
    r"\.layer\.(\d)\.layer_norm\.": r".sublayers.\1.norm.",
    r"\.layer\.(\d)\.DenseReluDense\.wi\.": r".sublayers.\1.body.up_proj.",
    r"\.layer\.(\d)\.DenseReluDense\.wo\.": r".sublayers.\1.body.down_proj.",
}
LLAVA = {
    r"^model\.": "",
    r"^lm_head\.": "decoder.head.",
    r"^multi_modal_projector\.linear_1\.": "projector.up.",
    r"^multi_modal_projector\.linear_2\.": "projector.down.",
    r"^vision_tower\.embeddings\.class_embedding": "vision.input.cls",
    r"^vision_tower\.embeddings\.patch_embedding\.": "vision.input.proj.",
    r"^vision_tower\.embeddings\.position_embedding\.": "vision.position.table.",
    r"^vision_tower\.pre_layrnorm\.": "vision.embedding_norm.",
    r"^vision_tower\.encoder\.layers\.": "vision.stack.blocks.",
    r"^language_model\.embed_tokens\.": "decoder.embedding.",
    r"^language_model\.norm\.": "decoder.norm.",
    r"^language_model\.layers\.": "decoder.stack.blocks.",
    r"self_attn\.o_proj\.": "sublayers.0.body.o_proj.",
    r"input_layernorm\.": "sublayers.0.norm.",
    r"post_attention_layernorm\.": "sublayers.1.norm.",
    r"mlp\.(gate|up|down)_proj\.": r"sublayers.1.body.\1_proj.",
    **PROJECTIONS,
}


@pytest.mark.ledger("model.encdec")
def test_t5_equals_transformers() -> None:
    """Logits with a padded source, gradients, and decoding with a cache."""
    import transformers

    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=24, d_kv=5, d_ff=40, num_layers=2, num_decoder_layers=3, num_heads=4,
        relative_attention_num_buckets=8, relative_attention_max_distance=16,
    )  # fmt: skip
    theirs = randomized(transformers.T5ForConditionalGeneration(config))
    cross_attention = CrossAttention(4, head_dim=5, scale=1.0)
    feedforward = Sublayer(FeedForward(40, "relu", bias=False))
    encoder_block = Block((Sublayer(Attention(4, head_dim=5, scale=1.0, mask=Full())), feedforward))
    decoder_block = Block((Sublayer(Attention(4, head_dim=5, scale=1.0)), Sublayer(cross_attention), feedforward))
    encoder_position = T5Buckets(8, 16, bidirectional=True, heads=4)
    spec = EncoderDecoder(
        Encoder(Tokens(VOCAB), 24, (Repeat((encoder_block,), 2),), encoder_position, norm=RMSNorm()),
        Decoder(VOCAB, 24, (Repeat((decoder_block,), 3),), T5Buckets(8, 16, heads=4), logit_scale=24**-0.5),
        shared=True,
    )
    ours = fill(spec.build(), renamed(dict(theirs.named_parameters()), T5))
    source, tokens, layout = random_ids(2, 20, seed=5), random_ids(2, 18), layout_with_padding([13, 20], 20)
    expected = theirs(source, attention_mask=layout.valid.long(), decoder_input_ids=tokens).logits
    found = ours(source, tokens, layout)
    assert error(found, expected) <= 1e-6  # their norms compute in float32
    for value in (found, expected):
        value.sin().sum().backward()
    expected_gradients = renamed({name: p.grad for name, p in theirs.named_parameters()}, T5)
    for name, parameter in ours.named_parameters():
        assert error(parameter.grad, expected_gradients[name]) <= 1e-5, name
    store = Contiguous(spec.memory(), 2, 18, torch.float64, source=20)
    with torch.no_grad():
        for t in range(18):
            step = ours(
                source if t == 0 else None,
                tokens[:, t : t + 1],
                layout,
                step_layout := TokenLayout(torch.full((2, 1), t)),
                store.begin_forward(step_layout),
            )
            assert error(step[:, 0], found[:, t]) <= 1e-9


@pytest.mark.ledger("mm.interleave")
def test_llava_equals_transformers() -> None:
    """LLaVA uses the output of the penultimate vision layer; our encoder has one layer less and no final norm."""
    import transformers

    vision = {"hidden_size": 24, "num_attention_heads": 4, "intermediate_size": 96, "image_size": 8, "patch_size": 4}
    text = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": VOCAB}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(num_hidden_layers=3, **vision),
        text_config=transformers.LlamaConfig(num_hidden_layers=2, **text),
        image_token_index=MARKER,
        image_seq_length=4,
    )
    theirs = randomized(transformers.LlavaForConditionalGeneration(config))
    norm = LayerNorm()
    vision_block = pre_norm_block(4, 96, norm, Full(), "quick_gelu")
    decoder_block = Block((Sublayer(Attention(2, position=Rope())), Sublayer(SwiGLU(24))))
    spec = Interleaved(
        Encoder(
            Patches((4, 4), (8, 8), bias=False), 24, (Repeat((vision_block,), 2),), Learned(5), embedding_norm=norm
        ),
        Decoder(VOCAB, 16, (Repeat((decoder_block,), 2),), tied=False),
        marker=MARKER,
    )
    tensors = renamed(dict(theirs.named_parameters()), LLAVA)
    unused = [name for name in tensors if name.startswith(("vision.stack.blocks.2.", "vision_tower.post_layernorm."))]
    ours = fill(spec.build(), {name: tensor for name, tensor in tensors.items() if name not in unused})
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    tokens = torch.tensor([spec.expand([1, MARKER, 2, 3]), spec.expand([MARKER, 7, 8, 9])])
    expected = theirs(tokens, pixel_values=images, attention_mask=torch.ones_like(tokens)).logits
    found = ours(tokens, images=images)
    assert error(found, expected) <= 1e-6  # their rotary angles are float32
    for value in (found, expected):
        value.sin().sum().backward()
    expected_gradients = renamed({name: p.grad for name, p in theirs.named_parameters()}, LLAVA)
    for name, parameter in ours.named_parameters():
        assert error(parameter.grad, expected_gradients[name].reshape(parameter.shape)) <= 1e-5, name
