"""A decoder with random weights in float64, and a tokenizer that has learned a few words."""

import torch

from regard.language_model import LanguageModel
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.position.rope import Rope
from regard.text.chat import DEFAULT_TEMPLATE
from regard.text.tokenizer import Tokenizer
from regard.text.train import bpe

TEXT = "They are unable to see the garden. The lamp is in the red box, said Mira, and the box is in the kitchen."


def tiny_decoder(context: int | None = 64, dtype: torch.dtype = torch.float64) -> LanguageModel:
    tokenizer = bpe([TEXT] * 8, vocab=330)
    block = Block((Sublayer(Attention(2, position=Rope())), Sublayer(SwiGLU(24))))
    model = Decoder(tokenizer.vocab_size, 16, (Repeat((block,), 2),), context=context).build(seed=0).to(dtype)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight *= 3  # far from uniform, so errors would show
    return LanguageModel(model, Tokenizer(tokenizer.core, eos="<|end|>", chat_template=DEFAULT_TEMPLATE))
