"""Open a model for the commands of `regard lens`, and encode a text for it."""

from pathlib import Path
from typing import TYPE_CHECKING

from regard.find_model import find_model

if TYPE_CHECKING:
    from regard.language_model import LanguageModel

GENERATED = 32  # tokens of the output of an encoder-decoder, if none is given


def open_inspected(name: Path, device: str, pairs: bool = False) -> "LanguageModel":
    """A decoder, or an encoder of texts; with `pairs` also an encoder-decoder."""
    find_model(name)  # before torch is imported: a mistyped name is refused at once
    from regard.load_model import load
    from regard.models.decoder import DecoderModule
    from regard.models.encoder import EncoderModule
    from regard.models.encoder_decoder import EncoderDecoderModule
    from regard.parts.input import Tokens

    llm = load(name, device)
    network = llm.model
    encoder = network.source if pairs and isinstance(network, EncoderDecoderModule) else network
    if isinstance(network, DecoderModule) or (
        isinstance(encoder, EncoderModule) and isinstance(encoder.spec.input, Tokens)
    ):
        return llm
    raise ValueError(
        f"{name} is of kind {network.spec.kind}; this command reads decoders and encoders of text: for others use "
        "regard.lens in Python"
    )


def encode(name: Path, llm: "LanguageModel", text: str) -> list[int]:
    """The ids of the text with the tokenizer's special tokens; ValueError if there are none, or too many."""
    from regard.models.encoder import EncoderModule
    from regard.models.encoder_decoder import EncoderDecoderModule

    spec, is_encoder = llm.model.spec, isinstance(llm.model, EncoderModule)
    if isinstance(llm.model, EncoderDecoderModule):
        spec, is_encoder = spec.source, True
    ids = llm.tokenizer.encode_with_special_tokens(text, special=True) if is_encoder else llm.encode(text)
    if not ids:
        raise ValueError("the text has no tokens; give a longer --text")
    limit = spec.context or spec.position.max_positions
    if len(ids) > (limit or len(ids)):
        raise ValueError(f"the text has {len(ids)} tokens, but {name} reads {limit}; shorten it")
    return ids


def encode_pair(name: Path, llm: "LanguageModel", text: str, target: str | None) -> tuple[list[int], list[int]]:
    """The ids of the source, and those of the output after the id that starts it."""
    from regard.objectives.text import start_id

    if target is None:
        target = llm.generate(text, temperature=0.0, max_new=GENERATED)
    return encode(name, llm, text), [start_id(llm.tokenizer), *llm.tokenizer.encode(str(target))]
