"""`regard.load`: a stored model with its tokenizer and, if it has them, its image processor and generation settings."""

from pathlib import Path
from typing import Any

import torch

from regard.adapt.quantized import pack_weights
from regard.checkpoint import model_folder
from regard.checkpoint.image_processor import has_image_processor, load_image_processor
from regard.compat import resolve_device, resolve_dtype
from regard.language_model import LanguageModel
from regard.models.encoder import Encoder
from regard.models.encoder_decoder import EncoderDecoderModule
from regard.models.interleaved import Interleaved
from regard.objectives.base import takes_tokens
from regard.parts.patches import Patches
from regard.text.tokenizer import Tokenizer
from regard.text.tokenizer_folder import GenerationConfig, has_tokenizer
from regard.text.train import byte
from regard.training.base_model import add_adapter, base_of, check_base
from regard.training.run import newest_checkpoint


def load(
    name: str | Path,
    device: str = "auto",
    dtype: torch.dtype | str | None = None,
    context: int | None = None,
    progress: model_folder.Progress | None = None,
    adapter: str | Path | None = None,
    packed: bool = False,
) -> LanguageModel:
    """The model of a run, a folder (regard or Hugging Face), a GGUF file, or an installed model such as "smollm2".

    A folder with an adapter names its model, which is loaded with the adapter. adapter: a run or folder with an adapter
    for this model, by regard or by PEFT; merge it with `regard.merge_lora(llm.model)`.

    device: cpu, cuda, cuda:1 …; auto: a GPU if there is one. dtype: a torch.dtype or its name, such as
    "bfloat16"; None or "auto": the stored one, on a CPU at least float32. context: maximum number of tokens of prompt
    and answer; None: the model's context. packed: keep the blocks of a GGUF file, such as Q4_K, in memory instead of
    float32 numbers.
    """
    dtype = resolve_dtype(dtype)  # before anything is read
    folder = newest_checkpoint(name)
    if adapter is None:
        base = base_of(folder)  # None if the folder has no adapter
    else:
        base, folder = folder, newest_checkpoint(adapter)
        check_base(folder, base)
    if base is not None:
        llm = load(base, device, dtype, context, progress, packed=packed)
        llm.model = add_adapter(llm.model, folder, base)
    else:
        checked = folder != Path(name)
        model = model_folder.load(folder, resolve_device(device), dtype, checked, progress, packed=packed)
        pack_weights(model)  # if it is quantized
        llm = with_tokenizer(model, folder, context)
    llm.folder = folder
    return llm


def with_tokenizer(model: Any, folder: Path, context: int | None) -> LanguageModel:
    """The model with all that its folder stores beside the weights."""
    reads_images = takes_images(model.spec) and has_image_processor(folder)
    return LanguageModel(
        model,
        load_tokenizer(folder, model.spec),
        context,
        generation=GenerationConfig.load(folder) if isinstance(model, EncoderDecoderModule) else None,
        image_processor=load_image_processor(folder) if reads_images else None,
        extra_files=model_folder.read_extra_files(folder),
        source_family=model_folder.read_source_family(folder),
    )


def takes_images(model: Any) -> bool:
    """Whether images are an input of the model: of a vision transformer, or of a decoder with image tokens."""
    images = isinstance(model, Encoder) and isinstance(model.input, Patches) and len(model.input.image) == 2
    return images or isinstance(model, Interleaved)


def load_tokenizer(folder: Path, model: Any) -> Tokenizer:
    """The tokenizer of a folder; a vision transformer without one gets one for bytes, which it does not use."""
    without_text = isinstance(model, Encoder) and not takes_tokens(model)
    return byte() if without_text and not has_tokenizer(folder) else Tokenizer.load(folder)
