"""Folders of `transformers` with tokenizer and processor: `regard generate` returns the tokens of their `generate`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from PIL import Image
from tokenizers import models, pre_tokenizers, processors

import regard
from regard.image_prompts import embed_prompt
from regard.language_model import LanguageModel
from tests.cli.conftest import regard as command
from tests.families.cases import VOCAB
from tests.families.cases.encoder_decoders import BART, T5
from tests.families.cases.vision import IMAGE_TOKEN, INTERLEAVED
from tests.families.pairs import make_pair

SPECIAL = ["<pad>", "</s>", "<s>", "<mask>", "<unk>", "<image>"]
TOKEN_IDS = {"pad_token_id": 0, "eos_token_id": [1, 11, 12, 13, 14, 15], "bos_token_id": 2}
PROMPTS = ["w7 w8 w9", "w30", "w60 w3 <mask> w4 w5 w61 w62 w63 w7 w8 w9", "w1 w2"]
TRANSLATORS = {
    "t5": ("T5ForConditionalGeneration", T5 | TOKEN_IDS | {"decoder_start_token_id": 0}),
    "bart": (
        "BartForConditionalGeneration",
        BART | TOKEN_IDS | {"decoder_start_token_id": 1, "forced_bos_token_id": 2, "forced_eos_token_id": 1},
    ),
    "marian": (
        "MarianMTModel",
        BART
        | TOKEN_IDS
        | {"eos_token_id": [1, 33], "decoder_start_token_id": 0}
        | {"bad_words_ids": [[0], [14], [34], [33], [5, 6]]},  # an id that ends the output is not banned
    ),
    # without decoder_start_token_id, the bos token starts the output
    "pegasus": ("PegasusForConditionalGeneration", BART | TOKEN_IDS | {"suppress_tokens": [50, 51, 52]}),
}
GENERATION_KEYS = (
    "decoder_start_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "bad_words_ids",
    "suppress_tokens",
)
GREEDY = {"max_new": 12, "temperature": 0.0}


def save_tokenizer(folder: Path, template: str) -> Any:
    """Save and return a tokenizer with the vocabulary w0, w1 …; `template` is the template of its post-processor."""
    vocab = {word: id for id, word in enumerate([*SPECIAL, *(f"w{i}" for i in range(VOCAB - len(SPECIAL)))])}
    core = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("</s>", 1), ("<s>", 2)])
    names = dict(zip(("pad_token", "eos_token", "bos_token", "mask_token", "unk_token"), SPECIAL, strict=False))
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, **names, extra_special_tokens={"image_token": "<image>"}
    )
    theirs.save_pretrained(folder)
    return theirs


@pytest.fixture(scope="module", params=TRANSLATORS)
def translator(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    name, settings = TRANSLATORS[request.param]
    generation = {key: value for key, value in settings.items() if key in GENERATION_KEYS}
    pair = make_pair(
        (name, {k: v for k, v in settings.items() if k not in GENERATION_KEYS}), tmp_path_factory.mktemp("t")
    )
    enlarge_layer_weights(pair.theirs)
    pair.theirs.generation_config = transformers.GenerationConfig(
        **{key: settings[key] for key in TOKEN_IDS}, **generation
    )
    pair.theirs.save_pretrained(pair.folder)
    return pair.folder, pair.theirs, save_tokenizer(pair.folder, "$A </s>")


@torch.no_grad()
def enlarge_layer_weights(theirs: Any) -> None:
    """Enlarge the matrices of the layers, so that the output depends on the source and does not repeat one token."""
    for name, parameter in theirs.named_parameters():
        if parameter.dim() > 1 and "embed" not in name and "shared" not in name:
            parameter *= 4


def their_ids(theirs: Any, inputs: dict[str, Any]) -> list[int]:
    found = theirs.generate(**inputs, max_new_tokens=GREEDY["max_new"], do_sample=False)[0]
    prompt_length = 1 if theirs.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    return found[prompt_length:].tolist()


def our_ids(llm: LanguageModel, prompt: str, **inputs: Any) -> list[int]:
    return [token.id for token, _ in llm.stream_tokens(prompt, **inputs, **GREEDY)]


def test_encoder_decoder_generates_as_transformers(translator: tuple[Path, Any, Any]) -> None:
    folder, theirs, tokenizer = translator
    llm = regard.load(folder, device="cpu")
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        assert llm.encode(prompt) == inputs["input_ids"][0].tolist()
        assert our_ids(llm, prompt) == their_ids(theirs, inputs)
    outputs = llm.generate(PROMPTS, **GREEDY)
    assert outputs == [llm.generate(prompt, **GREEDY) for prompt in PROMPTS]
    assert outputs == ["".join(llm.stream(prompt, **GREEDY)) for prompt in PROMPTS]
    assert len(set(outputs)) > 1 and llm.engine.idle


def test_generate_command_of_an_encoder_decoder_equals_transformers(
    translator: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    """Tested on the folder, on one with the token ids in config.json as in older versions, and on both imported."""
    folder, theirs, tokenizer = translator
    options = ("--prompt", PROMPTS[0], "--max-new", 12, "--temperature", 0)
    expected = their_ids(theirs, tokenizer(PROMPTS[0], return_tensors="pt", return_token_type_ids=False))
    older_folder = tmp_path / "older"
    older_folder.mkdir()
    for file in folder.iterdir():
        (older_folder / file.name).write_bytes(file.read_bytes())
    config, generation = (
        json.loads((older_folder / f"{name}.json").read_text()) for name in ("config", "generation_config")
    )
    model_settings = {key: value for key, value in config.items() if key not in GENERATION_KEYS}
    (older_folder / "config.json").write_text(json.dumps(model_settings | generation))
    (older_folder / "generation_config.json").unlink()
    for name, source in (("new", folder), ("old", older_folder)):
        result = command("import", source, tmp_path / name)
        assert result.exit_code == 0 and "try: regard generate" in result.output
        for model in (source, tmp_path / name):
            result = command("generate", model, *options, "--json")
            assert json.loads(result.stdout)["ids"] == expected, model
    printed = command("generate", folder, *options)
    assert printed.stdout.strip() == regard.load(folder, device="cpu").generate(PROMPTS[0], **GREEDY).strip()


def test_encoder_decoder_refuses_images_and_chat(translator: tuple[Path, Any, Any]) -> None:
    folder, *_ = translator
    llm = regard.load(folder, device="cpu")
    with pytest.raises(ValueError, match="of kind encoder_decoder and reads no images"):
        llm.generate("w1", images=["picture.png"])
    with pytest.raises(ValueError, match="no chat template"):
        llm.chat("w1")
    without_bos = LanguageModel(llm.model, llm.tokenizer)
    without_bos.tokenizer.bos = None
    with pytest.raises(ValueError, match="no token starts the output; set decoder_start_token_id"):
        without_bos.generate("w1")


def random_pictures() -> list[Image.Image]:
    generator = np.random.default_rng(0)
    sizes = ((23, 31, 3), (40, 17, 3), (9, 9, 4))  # the last is transparent
    return [Image.fromarray(generator.integers(0, 256, size, dtype=np.uint8)) for size in sizes]


PROMPTS_WITH_IMAGES = {  # prompt -> indices of its images
    "<image> w7 w8 w9": [0],
    "w7 <image> w3 w60 <image> w9": [1, 2],
    "w7 w8": [],
}


@pytest.fixture(scope="module", params=[*INTERLEAVED][:2])
def llava(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    pair = make_pair(INTERLEAVED[request.param], tmp_path_factory.mktemp("llava"))
    assert SPECIAL[IMAGE_TOKEN] == "<image>"
    tokenizer, (side, _) = save_tokenizer(pair.folder, "<s> $A"), pair.ours.spec.vision.input.image
    size = {"size": {"shortest_edge": side + 2}, "crop_size": {"height": side, "width": side}}
    processor = transformers.LlavaProcessor(
        transformers.CLIPImageProcessorPil(**size), tokenizer, patch_size=pair.ours.spec.vision.input.size[0],
        vision_feature_select_strategy=pair.theirs.config.vision_feature_select_strategy, num_additional_image_tokens=1,
    )  # fmt: skip
    processor.save_pretrained(pair.folder)
    return pair.folder, pair.theirs, processor


@torch.no_grad()
def test_prompts_with_images_generate_as_transformers(llava: tuple[Path, Any, Any], tmp_path: Path) -> None:
    folder, theirs, processor = llava
    llm, images = regard.load(folder, device="cpu", context=64), random_pictures()
    for prompt, indices in PROMPTS_WITH_IMAGES.items():
        prompt_images = [images[i] for i in indices]
        inputs = processor(images=prompt_images or None, text=prompt, return_tensors="pt", return_token_type_ids=False)
        assert our_ids(llm, prompt, images=prompt_images) == their_ids(theirs, inputs)
        ids, _ = embed_prompt(llm.model, llm.tokenizer, llm.image_processor, llm.encode(prompt), prompt_images)
        assert ids == inputs["input_ids"][0].tolist()
    batched = llm.generate(
        [*PROMPTS_WITH_IMAGES],
        images=[[images[i] for i in indices] for indices in PROMPTS_WITH_IMAGES.values()],
        **GREEDY,
    )
    assert batched == [
        llm.generate(prompt, images=[images[i] for i in indices], **GREEDY)
        for prompt, indices in PROMPTS_WITH_IMAGES.items()
    ]
    images[0].save(tmp_path / "picture.png")
    options = ("--prompt", "<image> w7 w8 w9", "--image", tmp_path / "picture.png", "--max-new", 12, "--temperature", 0)
    expected = our_ids(llm, "<image> w7 w8 w9", images=images[:1])
    assert command("import", folder, tmp_path / "imported").exit_code == 0
    for model in (folder, tmp_path / "imported"):
        result = command("generate", model, *options, "--json", "--context", 64)
        assert json.loads(result.stdout)["ids"] == expected
    # without <image> in the prompt, images precede it
    for image in ([tmp_path / "picture.png"], tmp_path / "picture.png", str(tmp_path / "picture.png"), images[0]):
        assert our_ids(llm, "w7 w8 w9", images=image) == expected


def test_interleaved_model_refuses_invalid_images(llava: tuple[Path, Any, Any]) -> None:
    folder, *_ = llava
    llm = regard.load(folder, device="cpu", context=64)
    with pytest.raises(ValueError, match="the prompt has 2 image tokens for 1 images; write <image> once per image"):
        llm.generate("<image> <image>", images=random_pictures()[:1])
    with pytest.raises(ValueError, match="the prompt has 1 image tokens for 0 images"):
        llm.generate("<image> w1")
    with pytest.raises(ValueError, match="2 prompts, but 1 sequences of images"):
        llm.generate(["w1", "w2"], images=[random_pictures()[:1]])
    expected = "expected a path or a Pillow image"
    pictures, pixels = random_pictures(), np.zeros((8, 8, 3), dtype=np.uint8)
    invalid = {
        "NoneType": [None, [None]],
        "ndarray": [pixels, [pixels]],
        "Tensor": [torch.zeros(1, 3, 8, 8)],
        "list": [[pictures]],
    }
    for name, values in invalid.items():
        for images in values:
            with pytest.raises(ValueError, match=f"images.* is of type {name}; {expected}"):
                llm.generate("<image> w1", images=images)
    for images in (None, pictures[0], "a.png", pictures[:2], ["a.png", "b.png"], [None, pictures[:1]]):
        with pytest.raises(ValueError, match="images.* is of type .*; expected one list of images per prompt"):
            llm.generate(["<image> w1", "<image> w2"], images=images)
    assert llm.engine.idle
    llm.image_processor = None
    with pytest.raises(ValueError, match="no preprocessor_config.json"):
        llm.generate("w1", images=random_pictures()[:1])
