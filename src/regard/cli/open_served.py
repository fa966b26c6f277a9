"""The models of a server: each loaded, with its engine if it generates text."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from regard.find_model import find_model

if TYPE_CHECKING:
    from rich.console import Console

    from regard.cli.open_engine import EngineOptions
    from regard.language_model import LanguageModel
    from regard.lens import HeadScores
    from regard.server.lens_thread import Lens
    from regard.server.served_model import ServedModel, TextEncoder


class NamedModel(NamedTuple):
    name: str
    path: Path


def named_model(text: str, name: str | None = None) -> NamedModel:
    """A model by MODEL or NAME=MODEL; without a name it has that of its folder. Raises ValueError if there is none."""
    given, sign, path = text.partition("=")
    if name is None and sign and given and not Path(text).exists():
        name, text = given, path
    find_model(text)
    return NamedModel(name or os.path.basename(os.path.abspath(text)), Path(text))


def named_models(texts: list[str], name: str | None) -> list[NamedModel]:
    """name: of the only model."""
    if name is not None and len(texts) > 1:
        raise ValueError(f"--name {name} is for one model; name several as NAME=MODEL, such as {name}={texts[0]}")
    models = [named_model(text, name) for text in texts]
    names = [model.name for model in models]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        example = f"{twice[0]}-2={texts[-1].rpartition('=')[2]}"
        raise ValueError(f"several models have the name {twice[0]!r}; give other names, such as {example}")
    return models


def open_served(models: list[NamedModel], console: "Console", options: "EngineOptions") -> "list[ServedModel]":
    """All weights are loaded before the engines divide the rest of the memory."""
    several = len(models) > 1
    loaded: list[tuple[LanguageModel, TextEncoder | None]] = []
    for name, path in models:
        with announced(console, f"loading {name} …"), named_errors(name if several else None):
            from regard.compat import run_in_thread  # imports torch

            loaded.append(run_in_thread(load_weights, path, options, several))

    from regard.cli.open_encoder import encoder_choices
    from regard.cli.open_engine import open_engine, print_choices
    from regard.server.served_model import Inspected, ServedModel

    engines = sum(encoder is None for _, encoder in loaded)
    served: list[ServedModel] = []
    for (name, path), (llm, encoder) in zip(models, loaded, strict=True):
        if several:
            console.print(f"[bold]{name}[/]", highlight=False)
        if encoder is not None:
            print_choices(encoder_choices(llm, encoder, options, several), console)
            served.append(
                ServedModel(name, llm.tokenizer, encoder=encoder, lens=open_lens(llm), inspected=Inspected(llm.model))
            )
            continue
        index = sum(model.engine is not None for model in served)
        with named_errors(name if several else None):
            open_engine(llm, console, options, index, engines, path)
            served.append(generating_model(name, path, llm, inspected=options.tensor_parallel == 1))
    return served


@contextmanager
def announced(console: "Console", text: str) -> Generator[None]:
    """Say what takes long: beside a spinner on a terminal, else in a line."""
    from rich.text import Text

    if console.is_terminal:
        with console.status(Text(text)):
            yield
    else:
        console.print(Text(text))
        yield


@contextmanager
def named_errors(name: str | None) -> Generator[None]:
    """Begin the message of a user's error with the name of the model that it concerns."""
    try:
        yield
    except ValueError as error:
        if name is None:
            raise
        raise ValueError(f"{name}: {error}") from error


def load_weights(path: Path, options: "EngineOptions", several: bool) -> "tuple[LanguageModel, TextEncoder | None]":
    """A model, and its functions if it is an encoder. several: --context is for those that generate text, and an
    encoder reads its own context."""
    from regard.cli.open_encoder import open_text_encoder
    from regard.cli.open_engine import quantize_weights
    from regard.cli.open_model import open_model

    adapter, device, context, dtype = options.adapter, options.device, options.context, options.dtype
    encoder = open_text_encoder(path, device, None if several else context, adapter, dtype)
    stored = options.quantize == "stored"
    loaded = encoder or (open_model(path, device, context, adapter, dtype, stored), None)
    if options.quantize is not None and not stored:
        quantize_weights(loaded[0].model, options.quantize)
    return loaded


def generating_model(name: str, path: Path, llm: "LanguageModel", inspected: bool = True) -> "ServedModel":
    """inspected: with a lens; a process of a tensor parallel engine has a part of the heads only."""
    from functools import partial

    from regard.cli.open_model import require_decoder
    from regard.image_prompts import embed_patches, expand_images
    from regard.models.encoder_decoder import EncoderDecoderModule
    from regard.models.interleaved import InterleavedModule
    from regard.parts.input import Tokens
    from regard.server.image_input import ImageReader
    from regard.server.served_model import Inspected, ServedModel
    from regard.speech.transcribe import speech_model

    seen = Inspected(llm.model) if inspected else None
    if isinstance(llm.model, EncoderDecoderModule):
        if not isinstance(llm.model.spec.source.input, Tokens):
            speech = speech_model(llm.model, llm.tokenizer, llm.engine)
            return ServedModel(
                name, llm.tokenizer, llm.engine, read_adapter=llm.read_adapter, speech=speech, inspected=seen
            )
        lens, seen = (open_lens(llm), Inspected(llm.model, llm.decoder_start)) if inspected else (None, None)
        return ServedModel(
            name, llm.tokenizer, llm.engine, lens=lens, submit_source=llm.submit_source, read_adapter=llm.read_adapter,
            inspected=seen,
        )  # fmt: skip
    if isinstance(llm.model, InterleavedModule):
        marker = llm.model.spec.marker
        expand = partial(expand_images, llm.model, llm.tokenizer)
        embed = partial(embed_patches, llm.model, llm.image_processor)
        reader = ImageReader(llm.tokenizer.decode_token(marker), marker, expand, embed)
        return ServedModel(
            name, llm.tokenizer, llm.engine, images=reader, read_adapter=llm.read_adapter, inspected=seen
        )
    require_decoder(path, llm)
    if not inspected:
        return ServedModel(name, llm.tokenizer, llm.engine)
    return ServedModel(
        name, llm.tokenizer, llm.engine, lens=open_lens(llm), read_adapter=llm.read_adapter, inspected=seen
    )


def open_lens(llm: "LanguageModel") -> "Lens":
    """Attention maps of a decoder, an encoder of texts, or an encoder-decoder."""
    from functools import partial

    from regard.lens import RecordedAttention, attention_layers, score_heads
    from regard.lens.detectors import longest_length
    from regard.lens.inputs import vocab_of
    from regard.lens.recorded_attention import copy_with_shared_tensors
    from regard.models.encoder_decoder import EncoderDecoderModule
    from regard.server.lens_thread import Lens

    record, layers, spec = partial(RecordedAttention, llm.model), attention_layers(llm.model), llm.model.spec
    if isinstance(llm.model, EncoderDecoderModule):
        vocabs = vocab_of(spec.source), vocab_of(spec.target)
        return Lens(record, layers, vocabs[0], start=(llm.decoder_start,), target_vocab=vocabs[1])
    vocab = vocab_of(spec)

    def score() -> "HeadScores":
        model, start = copy_with_shared_tensors(llm.model), llm.tokenizer.prefix_ids
        return score_heads(model, vocab, min(32, longest_length(model, vocab, start)), start=start)

    return Lens(record, layers, vocab, score if any(layer.heads for layer in layers) else None)


def named_adapters(texts: list[str], models: list[NamedModel]) -> dict[str, Path]:
    """Adapters by NAME=PATH, for the only model. Raises ValueError if there are several, or a name is taken."""
    if texts and len(models) > 1:
        raise ValueError("--lora-modules is for one model; serve the models in servers of their own")
    adapters: dict[str, Path] = {}
    for text in texts:
        name, sign, path = text.partition("=")
        if not (sign and name and path):
            raise ValueError(f"--lora-modules {text} is not NAME=PATH, such as --lora-modules pirate=runs/pirate")
        if name in adapters or name == models[0].name:
            raise ValueError(f"--lora-modules {text}: the name {name!r} is taken; choose another")
        if not Path(path).is_dir():
            raise ValueError(f"--lora-modules {text}: there is no folder {path}; give a run or an adapter")
        adapters[name] = Path(path)
    return adapters


def load_adapters(model: "ServedModel", adapters: dict[str, Path], console: "Console") -> None:
    from regard.cli.open_engine import warm_up

    for name, path in adapters.items():
        if model.engine is None or model.read_adapter is None:
            raise ValueError(f"{model.name} generates no text, so it has no adapters; leave --lora-modules out")
        weights = model.read_adapter(path)
        model.engine.engine.load_adapter(name, weights)
        console.print(f"  adapter  [bold]{name}[/]  [dim](rank {weights.rank}, {path})[/]", highlight=False)
    if adapters and model.engine is not None:
        warm_up(model.engine.engine.loras, console)  # also compiles their decode step
