"""Prompts with images: one image token per image becomes one per patch, with the embeddings of the patches.

ids, images ─ expand_images ─▶ ids with one image token per patch ─ embed_patches ─▶ embeddings (L, D)
"""

import torch
from torch import Tensor

from regard.checkpoint.image_processor import ImageProcessor, Images, image_list
from regard.models.interleaved import InterleavedModule
from regard.text.tokenizer import Tokenizer


def expand_images(model: InterleavedModule, tokenizer: Tokenizer, ids: list[int], images: int) -> list[int]:
    """The ids with one image token per patch. ValueError unless they have one per image."""
    spec = model.spec
    if ids.count(spec.marker) != images:
        token = tokenizer.decode_token(spec.marker)
        raise ValueError(
            f"the prompt has {ids.count(spec.marker)} image tokens for {images} images; "
            f"write {token} once per image, or leave it out"
        )
    return spec.expand(ids)


@torch.inference_mode()
def embed_patches(model: InterleavedModule, processor: ImageProcessor | None, ids: list[int], images: Images) -> Tensor:
    """The embeddings (L, D) of ids with one image token per patch."""
    if processor is None:
        raise ValueError("the folder has no preprocessor_config.json, so images cannot be read; copy it there")
    weight = model.decoder.embedding.weight
    pixels = processor.read(images).to(weight)
    return model.embed(torch.tensor([ids], device=weight.device), pixels)[0][0]


def embed_prompt(
    model: InterleavedModule, tokenizer: Tokenizer, processor: ImageProcessor | None, ids: list[int], images: Images
) -> tuple[list[int], Tensor | None]:
    """The ids (L,) with one image token per patch of each image, and their embeddings (L, D), None without images.

    If the prompt has no image tokens, they are inserted at its start, after the prefix ids. ValueError if it has some,
    but not one per image.

    processor: of the model's folder; None if it has none, so that images cannot be read.
    images: in the order of the image tokens.
    """
    images, marker, prefix = image_list(images), model.spec.marker, len(tokenizer.prefix_ids)
    if marker not in ids:
        prefix = prefix if tuple(ids[:prefix]) == tokenizer.prefix_ids else 0
        ids = [*ids[:prefix], *[marker] * len(images), *ids[prefix:]]
    ids = expand_images(model, tokenizer, ids, len(images))
    return ids, embed_patches(model, processor, ids, images) if images else None
