"""Open a model for the commands of `regard lens`, encode a text for it, and print JSON."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.find_model import find_model

if TYPE_CHECKING:
    from regard.language_model import LanguageModel

GENERATED = 32  # tokens of the output of an encoder-decoder, if none is given
TargetOption = Annotated[
    str | None,
    typer.Option(help="The output of an encoder-decoder so far; by default none, so that its first token is next."),
]


def open_inspected(name: Path, device: str, instead: str = "") -> "LanguageModel":
    """A decoder, an encoder of texts, or an encoder-decoder of texts.

    instead: for a command that does not show encoder-decoders, the command or function to use for them.
    """
    find_model(name)  # before torch is imported: a mistyped name is refused at once
    from regard.load_model import load
    from regard.models.decoder import DecoderModule
    from regard.models.encoder import EncoderModule
    from regard.models.encoder_decoder import EncoderDecoderModule
    from regard.parts.input import Tokens

    llm = load(name, device)
    network = llm.model
    pair = isinstance(network, EncoderDecoderModule)
    encoder = network.source if pair else network
    reads_text = isinstance(encoder, EncoderModule) and isinstance(encoder.spec.input, Tokens)
    if not isinstance(network, DecoderModule) and not reads_text:
        raise ValueError(
            f"{name} is of kind {network.spec.kind}; this command reads decoders and encoders of text: for others use "
            "regard.lens in Python"
        )
    if pair and instead:
        raise ValueError(f"{name} is an encoder-decoder, which this command does not show; {instead}")
    return llm


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
    check_length("text", ids, spec, name)
    return ids


def check_length(what: str, ids: list[int], spec: Any, name: Path) -> None:
    from regard.lens.inputs import length_limit

    limit = length_limit(spec)
    if len(ids) > (limit or len(ids)):
        raise ValueError(f"the {what} has {len(ids)} tokens, but {name} reads {limit}; shorten it")


def encode_pair(name: Path, llm: "LanguageModel", text: str, target: str | None) -> tuple[list[int], list[int]]:
    """The ids of the source, and those of the output after the id that starts it; None: the output is generated."""
    if target is None:
        target = str(llm.generate(text, temperature=0.0, max_new=GENERATED))
    ids = [llm.decoder_start, *(llm.tokenizer.encode(target) if target else ())]
    check_length("target", ids, llm.model.spec.target, name)
    return encode(name, llm, text), ids


def encode_inputs(
    name: Path, llm: "LanguageModel", text: str, target: str | None
) -> list[int] | tuple[list[int], list[int]]:
    """The ids that a decoder or encoder reads, or the pair of an encoder-decoder, whose output so far is `target`."""
    from regard.models.encoder_decoder import EncoderDecoderModule

    if isinstance(llm.model, EncoderDecoderModule):
        return encode_pair(name, llm, text, target or "")
    if target is not None:
        raise ValueError(f"{name} is not an encoder-decoder; leave --target out")
    return encode(name, llm, text)


def print_json(value: Any) -> None:
    """JSON has neither NaN nor infinity: those of a model with broken weights become null."""
    try:
        print(json.dumps(value, allow_nan=False))
    except ValueError:
        print(json.dumps(finite(value)))


def finite(value: Any) -> Any:
    """Nested lists and dictionaries with None in place of numbers that are not finite."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
