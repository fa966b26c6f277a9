"""Small trained models for instruments that show what training found, with the languages they were trained on.

    sentences       the old key opens the small box . it is old .           the verb and the object follow from the
                                                                            subject, the last adjective from the first
    translation     the old key opens the small box -> kivo sen bako tum lura       nouns first, adjectives after their
                                                                                    noun, the verb last, no articles
    reversal        random symbols in reverse order
    vision          a picture of noise -> the bright shape in it

The weights are stored in float16 beside this file. `python -m regard.instruments.train_examples` trains them again.
"""

from functools import cache
from pathlib import Path
from random import Random

import tokenizers
import torch
from safetensors.torch import load_file
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from regard.instruments.instrument import Subject
from regard.models.base import Model
from regard.models.decoder import Decoder, DecoderModule
from regard.models.encoder import Encoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.heads import MaskedLM
from regard.models.presets import vit
from regard.models.seq2seq import seq2seq
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.cross_attention import CrossAttention
from regard.parts.feedforward import FeedForward
from regard.parts.input import Tokens
from regard.parts.position.learned import Learned
from regard.parts.position.rope import Rope
from regard.parts.recurrent import GRU
from regard.text.tokenizer import Tokenizer

WEIGHTS = Path(__file__).parent / "weights"
ADJECTIVES = ("old", "red", "small", "warm", "good", "new")
FACTS = {  # subject: its verb and its object
    "lamp": ("lights", "room"),
    "boat": ("carries", "stone"),
    "cup": ("holds", "tea"),
    "key": ("opens", "box"),
    "bird": ("eats", "seed"),
    "cook": ("bakes", "bread"),
}
VERBS, OBJECTS = zip(*FACTS.values(), strict=True)
START, MASK = "<s>", "[MASK]"
WORDS = (START, MASK, "the", "it", "is", ".", *ADJECTIVES, *FACTS, *VERBS, *OBJECTS)
STEMS = ("sen", "rota", "tum", "calu", "bon", "novi", "lami", "bato", "kupa", "kivo", "avi", "koko",
         "luzi", "porta", "teno", "lura", "mango", "fuva", "roma", "petra", "teo", "bako", "semo", "pano")  # fmt: skip
DICTIONARY = dict(zip((*ADJECTIVES, *FACTS, *VERBS, *OBJECTS), STEMS, strict=True))
TARGET_WORDS = (START, *DICTIONARY.values())
SYMBOLS, MAX_REVERSED = 8, 12  # symbols 1 … 8; 0 starts the output
WIDTH, LENGTH = 32, 24
DRAFT_WIDTH = 12  # of the draft model of the language model
SIDE, PATCH = 24, 4  # pixels
SHAPES = ("disc", "ring", "square", "cross")
MARGIN = 5  # the centre of a shape has this distance from the border
NOISE = 0.3  # the brightest pixel of the background; a shape has 1


def sentence(rng: Random) -> list[str]:
    subject, adjective = rng.choice(list(FACTS)), rng.choice(ADJECTIVES)
    verb, thing = FACTS[subject]
    first = ["the", adjective, subject, verb, "the", rng.choice(ADJECTIVES), thing, "."]
    return [START, *first, "it", "is", adjective, "."]


def pair(rng: Random) -> tuple[list[str], list[str]]:
    """A sentence with any verb and object, and its translation."""
    a, b = rng.choice(ADJECTIVES), rng.choice(ADJECTIVES)
    subject, verb, thing = rng.choice(list(FACTS)), rng.choice(VERBS), rng.choice(OBJECTS)
    return ["the", a, subject, verb, "the", b, thing], translation_of([a, subject, verb, b, thing])


def translation_of(words: list[str]) -> list[str]:
    a, subject, verb, b, thing = (DICTIONARY[word] for word in words)
    return [subject, a, thing, b, verb]


def picture(shape: str, x: float, y: float, seed: int = 0) -> Tensor:
    """(3, SIDE, SIDE), grey, values from 0 to 1. x, y: centre of the shape in pixels; seed: of the background"""
    axis = torch.arange(SIDE) + 0.5
    across, down = (axis - x).abs()[None], (axis - y).abs()[:, None]
    distance = (across**2 + down**2).sqrt()
    inside = {
        "disc": distance < 4.2,
        "ring": (distance < 4.4) & (distance > 2.4),
        "square": (across < 3.8) & (down < 3.8),
        "cross": ((across < 1.2) & (down < 4.4)) | ((down < 1.2) & (across < 4.4)),
    }[shape]
    background = NOISE * torch.rand(SIDE, SIDE, generator=torch.Generator().manual_seed(seed))
    return torch.where(inside, 1.0, background).expand(3, SIDE, SIDE)


def random_picture(rng: Random) -> tuple[Tensor, int]:
    """A picture and the index of its shape."""
    label, x, y = rng.randrange(len(SHAPES)), *(rng.uniform(MARGIN, SIDE - MARGIN) for _ in range(2))
    return picture(SHAPES[label], x, y, rng.getrandbits(32)), label


def block(attention: Attention, *more: Sublayer) -> Block:
    return Block((Sublayer(attention), *more, Sublayer(FeedForward(2 * WIDTH))))


ENCODER_BLOCK = block(Attention(4))


def encoder_decoder(source_vocab: int, vocab: int) -> EncoderDecoder:
    """One layer on each side; one head of cross-attention, so that its weights are easy to read."""
    target_block = block(Attention(1), Sublayer(CrossAttention(1)))
    return EncoderDecoder(
        Encoder(Tokens(source_vocab), WIDTH, (Repeat((ENCODER_BLOCK,), 1),), Learned(LENGTH)),
        Decoder(vocab, WIDTH, (Repeat((target_block,), 1),), Learned(LENGTH)),
    )


def vision_encoder(patch: int) -> Encoder:
    return vit(SIDE, patch, WIDTH, 2, 2 * WIDTH, 2, len(SHAPES))


@cache
def specs() -> dict[str, Model]:
    words, targets, symbols = len(WORDS), len(TARGET_WORDS), SYMBOLS + 1
    decoder_block = block(Attention(4, position=Rope()))
    draft_block = Block((Sublayer(Attention(2, position=Rope())), Sublayer(FeedForward(2 * DRAFT_WIDTH))))
    return {
        "language-model": Decoder(words, WIDTH, (Repeat((decoder_block,), 2),), context=LENGTH),
        "draft": Decoder(words, DRAFT_WIDTH, (Repeat((draft_block,), 1),), context=LENGTH),
        "masked": Encoder(Tokens(words), WIDTH, (Repeat((ENCODER_BLOCK,), 2),), Learned(LENGTH), head=MaskedLM()),
        "translation": encoder_decoder(words, targets),
        "additive": seq2seq(targets, WIDTH, GRU(), "additive", source_vocab=words),
        "reversal": seq2seq(symbols, 24),
        "reversal-attention": encoder_decoder(symbols, symbols),
        "vision": vision_encoder(PATCH),
    }


@cache
def trained(name: str) -> torch.nn.Module:
    module = specs()[name].build(seed=0)
    module.load_state_dict({key: value.float() for key, value in load_file(WEIGHTS / f"{name}.safetensors").items()})
    return module.eval()


def ids(words: list[str], vocabulary: tuple[str, ...] = WORDS) -> list[int]:
    unknown = [word for word in words if word not in vocabulary]
    if unknown:
        known = " ".join(vocabulary[2:])
        raise ValueError(f"{unknown[0][:20]!r} is not among the {len(vocabulary) - 2} words of this model: {known}")
    return [vocabulary.index(word) for word in words]


@cache
def word_tokenizer() -> Tokenizer:
    core = tokenizers.Tokenizer(models.WordLevel({word: id for id, word in enumerate(WORDS)}, unk_token=MASK))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.decoder = decoders.Fuse()
    return Tokenizer(core)


@cache
def example_subject() -> Subject:
    """The small language model, for instruments that have no served model."""
    model = trained("language-model")
    assert isinstance(model, DecoderModule)
    return Subject("the example model", model, word_tokenizer())
