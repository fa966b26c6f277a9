"""A model with its tokenizer, for use from Python in one line.

    llm = regard.load("smollm2")
    llm.generate("The three primary colours are")
    llm.chat([{"role": "user", "content": "Name a primary colour."}])
    for text in llm.stream("Once upon a time"): print(text, end="")
    regard.load("models/t5").generate("translate English to German: a cat")
    regard.load("models/llava").generate("USER: <image> What is it? ASSISTANT:", images=["picture.png"])
    regard.load("minilm").embed(["a cat", "a kitten"])
    regard.load("runs/classify").classify(["a good film", ("a premise", "a hypothesis")])

Its attributes can also be used separately: `model` (an nn.Module), `tokenizer` and `engine`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.checkpoint import model_folder
from regard.checkpoint.image_processor import (
    ImageProcessor,
    Images,
    has_image_processor,
    image_list,
    images_per_prompt,
    load_image_processor,
)
from regard.engine.engine import Engine
from regard.engine.inputs import pad_ids
from regard.engine.request import GenerationError, Request, Sampling, Token
from regard.models.decoder import DecoderModule
from regard.models.encoder import EncoderModule
from regard.models.encoder_decoder import EncoderDecoderModule
from regard.models.heads import Pooled, Pooler
from regard.models.interleaved import InterleavedModule
from regard.predictions import classify, load_tokenizer, takes_images
from regard.spec import suggest_name
from regard.text.chat import encode_chat
from regard.text.detokenizer import TextStream
from regard.text.tokenizer import Tokenizer
from regard.text.tokenizer_folder import GenerationConfig
from regard.training.base_model import add_adapter, base_of, check_base
from regard.training.run import newest_checkpoint

ChatMessages = Sequence[Mapping[str, Any]]  # [{"role": "user", "content": "…"}, …]
EMBED_BATCH = 32
SAMPLING_FIELDS = [field.name for field in fields(Sampling) if field.name != "stop_ids"]


class SamplingOptions(TypedDict, total=False):
    """The fields of `Sampling` as keyword arguments."""

    max_new: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None


class LanguageModel:
    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        context: int | None = None,
        rows: int = 8,
        generation: GenerationConfig | None = None,
        image_processor: ImageProcessor | None = None,
        extra_files: Mapping[str, bytes] | None = None,
        source_family: str | None = None,
    ):
        """context: maximum number of tokens; None: the model's context. It limits the sum of prompt and answer, for an
        encoder-decoder each of the two.

        rows: prompts generated at once. generation: for encoder-decoders. image_processor: for models that read images.
        extra_files, source_family: written by `regard.save` (checkpoint/model_folder.py).
        """
        if context is not None:
            check_context(context, model)
        self.model: Any = model.eval()
        self.tokenizer = tokenizer
        self.context, self.rows = context, rows
        self.generation, self.image_processor = generation or GenerationConfig(), image_processor
        self.extra_files, self.source_family = extra_files or {}, source_family

    @cached_property
    def engine(self) -> Engine:
        return Engine(self.model, rows=self.rows, capacity=self.context, source_capacity=self.context)

    @property
    def continues_prompt(self) -> bool:
        """Whether the generated text continues the prompt: always, except for an encoder-decoder."""
        return not isinstance(self.model, EncoderDecoderModule)

    def generate(
        self,
        prompt: str | Sequence[str],
        *,
        images: "Images | Sequence[Images]" = (),
        stop: Sequence[str] = (),
        **sampling: Unpack[SamplingOptions],
    ) -> Any:
        """The generated text: the continuation of a prompt, or the output of an encoder-decoder for it.

        Several prompts are generated in batches and return a list. images: the image of the prompt, or the images in
        the order of its image tokens; for several prompts, one sequence of images per prompt. stop: strings at which
        the text ends; they are not part of it. The other options are the fields of `Sampling`.
        """
        texts = [prompt] if isinstance(prompt, str) else prompt
        image_lists: Sequence[Any] = [images] if isinstance(prompt, str) else images_per_prompt(images, len(texts))
        prompts = [(self.encode(text), prompt_images) for text, prompt_images in zip(texts, image_lists, strict=True)]
        size, outputs = self.engine.max_requests, []
        for start in range(0, len(prompts), size):
            outputs += self.generate_batch(prompts[start : start + size], stop, sampling)
        return outputs[0] if isinstance(prompt, str) else outputs

    def generate_batch(
        self, prompts: list[tuple[list[int], Images]], stop: Sequence[str], options: SamplingOptions
    ) -> list[str]:
        """The outputs for at most `engine.max_requests` prompts. If one fails, all are removed from the engine."""
        requests: list[Request] = []
        try:
            for ids, images in prompts:
                requests.append(self.submit_prompt(ids, images, options))
            streams = [self.run(request, self.text_stream(request, stop)) for request in requests]
            return ["".join(text for _, text in stream) for stream in streams]
        finally:
            for request in requests:
                self.engine.cancel(request)

    def chat(
        self,
        messages: str | ChatMessages,
        *,
        images: Images = (),
        stop: Sequence[str] = (),
        **sampling: Unpack[SamplingOptions],
    ) -> str:
        """The answer to a conversation, formatted by the model's chat template; a string is one user message."""
        return "".join(text for _, text in self.submit(self.encode_chat(messages), stop, False, sampling, images))

    def stream(
        self,
        prompt: str | ChatMessages,
        *,
        images: Images = (),
        stop: Sequence[str] = (),
        **sampling: Unpack[SamplingOptions],
    ) -> Iterator[str]:
        """The text in chunks as it is generated: the continuation of a string, or the answer to messages."""
        for _, text in self.stream_tokens(prompt, images=images, stop=stop, **sampling):
            if text:
                yield text

    def stream_tokens(
        self,
        prompt: str | ChatMessages,
        *,
        images: Images = (),
        stop: Sequence[str] = (),
        **sampling: Unpack[SamplingOptions],
    ) -> "Iterator[tuple[Token, str]]":
        """Every token with the text that it completes, which is often empty."""
        ids = self.encode(prompt) if isinstance(prompt, str) else self.encode_chat(prompt)
        return self.submit(ids, stop, isinstance(prompt, str), sampling, images)

    @torch.inference_mode()
    def embed(self, texts: str | Sequence[str]) -> Tensor:
        """(N, D) unit vectors, one per text; for a single string (D,). Texts are truncated to the model's context.

        The embedding is the output of an encoder's pooling head, or the mean of the hidden states: those of an encoder
        without a head, or the input of a decoder's head.
        """
        if not isinstance(self.model, EncoderModule | DecoderModule):
            raise ValueError(f"this model is of kind {self.model.spec.kind}; only encoders and decoders embed texts")
        inputs = [texts] if isinstance(texts, str) else list(texts)
        rows = [self.truncate(self.tokenizer.encode_with_special_tokens(text)) for text in inputs]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))  # similar lengths together: little padding
        vectors = {}
        for start in range(0, len(rows), EMBED_BATCH):
            indices = order[start : start + EMBED_BATCH]
            vectors |= dict(zip(indices, self.embed_batch([rows[i] for i in indices]), strict=True))
        if isinstance(texts, str):
            return vectors[0]
        return torch.stack([vectors[i] for i in range(len(rows))]) if rows else torch.empty(0)

    def classify(self, inputs: Any) -> Any:
        """The Prediction of a text, of a pair (a tuple of two texts) or of an image file; of a list, a list of them.

        The model needs a classification head. It gives a label and the probabilities of all labels, a head with one
        output a `value`, and a head for words a list with a Prediction for each word (text.split()).
        """
        single = not isinstance(inputs, list)
        found = classify(self.model, self.tokenizer, [inputs] if single else inputs, self.context, self.image_processor)
        return found[0] if single else found

    def embed_batch(self, rows: list[list[int]]) -> Tensor:
        if min(map(len, rows)) == 0:
            raise ValueError("a text has no tokens; leave out empty texts")
        tokens, layout = pad_ids(rows, next(self.model.parameters()).device)
        if isinstance(self.model, EncoderModule):
            head = self.model.spec.head
            if isinstance(head, Pooled):
                return F.normalize(self.model(tokens, layout), dim=-1)
            if not (head is None or isinstance(head, Pooler)):
                raise ValueError(
                    f"the head of this encoder is {head.kind}, which has no embedding; use an encoder without a head"
                )
            hidden = self.model(tokens, layout)
        else:
            hidden = self.model.hidden(tokens, layout)
        if layout.valid is not None:
            hidden = hidden * layout.valid.unsqueeze(-1)
        return F.normalize(hidden.sum(1), dim=-1)  # (B, D); the mean's scale is lost in the norm

    def truncate(self, ids: list[int]) -> list[int]:
        """The ids, truncated to the model's context; the last one, a special token, is kept."""
        spec = self.model.spec
        limit = self.context or spec.context or spec.position.max_positions
        return ids if limit is None or len(ids) <= limit else [*ids[: limit - 1], ids[-1]]

    def encode(self, prompt: str, special: bool = True) -> list[int]:
        """The ids of a prompt after the tokenizer's prefix ids; for an encoder-decoder with all its special tokens.

        special: special tokens in the prompt, such as <|user|>, become their ids.
        """
        if isinstance(self.model, EncoderDecoderModule):
            return self.tokenizer.encode_with_special_tokens(prompt, special=special)
        return [*self.tokenizer.prefix_ids, *self.tokenizer.encode(prompt, special)]

    def encode_chat(self, messages: str | ChatMessages) -> list[int]:
        conversation = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        return encode_chat(self.tokenizer, [dict(message) for message in conversation])

    def submit(
        self,
        ids: list[int],
        stop: Sequence[str],
        continues_prompt: bool,
        options: SamplingOptions,
        images: Images = (),
    ) -> "Iterator[tuple[Token, str]]":
        """Submit a request at once, and return an iterator over its tokens and their text."""
        request = self.submit_prompt(ids, images, options)
        return self.run(request, self.text_stream(request, stop, continues_prompt))

    def submit_prompt(self, ids: list[int], images: Images, options: SamplingOptions) -> Request:
        """Submit the ids of a prompt: the source of an encoder-decoder, for other models the prompt of the decoder."""
        if unknown := [name for name in options if name not in SAMPLING_FIELDS]:
            raise TypeError(f"there is no sampling option {unknown[0]!r}; {suggest_name(unknown[0], SAMPLING_FIELDS)}")
        sampling = Sampling(stop_ids=self.tokenizer.stop_ids, **options)
        if isinstance(self.model, InterleavedModule):
            ids, embeddings = self.embed_images(ids, images)
            return self.engine.submit(ids, sampling, embeddings=embeddings)
        if image_list(images):
            raise ValueError(f"this model is of kind {self.model.spec.kind} and reads no images; leave them out")
        if isinstance(self.model, EncoderDecoderModule):
            return self.submit_source(ids, sampling)
        return self.engine.submit(ids, sampling)

    def submit_source(self, ids: Sequence[int], sampling: Sampling) -> Request:
        """Submit the source of an encoder-decoder; the generation config sets the output's start and end tokens."""
        settings = self.generation
        start = self.tokenizer.bos if settings.decoder_start_token_id is None else settings.decoder_start_token_id
        if start is None:
            raise ValueError("no token starts the output; set decoder_start_token_id in generation_config.json")
        sampling = replace(
            sampling, suppress_ids=settings.suppress_tokens, forced_bos_id=settings.forced_bos_token_id,
            forced_eos_id=settings.forced_eos_token_id,
        )  # fmt: skip
        return self.engine.submit([start], sampling, ids)

    def text_stream(self, request: Request, stop: Sequence[str], continues_prompt: bool = True) -> TextStream:
        continues = continues_prompt and self.continues_prompt
        return TextStream(self.tokenizer, stop, prompt_ids=request.ids if continues else ())

    @torch.inference_mode()
    def embed_images(self, ids: list[int], images: Images) -> tuple[list[int], Tensor | None]:
        """The ids with one image token per patch of each image, and their embeddings.

        If the prompt has no image tokens, they are inserted at its start, after the prefix ids.
        """
        images, spec, prefix = image_list(images), self.model.spec, len(self.tokenizer.prefix_ids)
        if spec.marker not in ids:
            prefix = prefix if tuple(ids[:prefix]) == self.tokenizer.prefix_ids else 0
            ids = [*ids[:prefix], *[spec.marker] * len(images), *ids[prefix:]]
        if ids.count(spec.marker) != len(images):
            token = self.tokenizer.decode_token(spec.marker)
            raise ValueError(
                f"the prompt has {ids.count(spec.marker)} image tokens for {len(images)} images; "
                f"write {token} once per image, or leave it out"
            )
        if not images:
            return ids, None
        if self.image_processor is None:
            raise ValueError("the folder has no preprocessor_config.json, so images cannot be read; copy it there")
        ids, weight = spec.expand(ids), self.model.decoder.embedding.weight
        pixels = self.image_processor.read(images).to(weight)
        return ids, self.model.embed(torch.tensor([ids], device=weight.device), pixels)[0][0]

    def run(self, request: Request, stream: TextStream) -> "Iterator[tuple[Token, str]]":
        """Step the engine until this request is done; other requests advance with it."""
        position = 0  # of the next token to yield
        try:
            while True:
                while position < len(request.new) and stream.finish is None:
                    token = request.new[position]
                    position += 1
                    yield token, stream.push(token)
                if request.finish is not None or stream.finish is not None:
                    break
                self.engine.step()
        finally:
            self.engine.cancel(request)
        if request.error is not None:
            raise GenerationError(request.error)


def check_context(context: int, model: nn.Module) -> None:
    """Raise ValueError if the model does not support this context."""
    match model:
        case EncoderDecoderModule(spec=spec):
            parts = (spec.source, spec.target)
        case InterleavedModule(spec=spec):
            parts = (spec.decoder,)
        case EncoderModule(spec=spec) | DecoderModule(spec=spec):
            parts = (spec,)
        case _:
            parts = ()
    if context < 1:
        raise ValueError(f"context={context} must be positive")
    for part in parts:
        limit = part.context or part.position.max_positions
        if limit is not None and context > limit:
            raise ValueError(f"context={context} exceeds the model's context of {limit} tokens; choose at most {limit}")


def load(
    name: str | Path,
    device: str = "auto",
    dtype: torch.dtype | None = None,
    context: int | None = None,
    progress: model_folder.Progress | None = None,
    adapter: str | Path | None = None,
) -> LanguageModel:
    """The model of a run, a folder (regard or Hugging Face), a GGUF file, or an installed model such as "smollm2".

    A folder with an adapter names its model, which is loaded with the adapter. adapter: a run or folder with an adapter
    for this model, by regard or by PEFT; merge it with `regard.merge_lora(llm.model)`.

    device: cpu, cuda, cuda:1 …; auto: a GPU if there is one. dtype: None: the stored one, on a CPU at least float32.
    context: maximum number of tokens of prompt and answer; None: the model's context.
    """
    folder = newest_checkpoint(name)
    if adapter is not None:
        llm, adapter = load(folder, device, dtype, context, progress), newest_checkpoint(adapter)
        check_base(adapter, folder)
        add_adapter(llm.model, adapter, llm.source_family)
        return llm
    if (base := base_of(folder)) is not None:
        llm = load(base, device, dtype, context, progress)
        add_adapter(llm.model, folder, llm.source_family)
        return llm
    model = model_folder.load(folder, resolve_device(device), dtype, checked=folder != Path(name), progress=progress)
    reads_images = takes_images(model.spec) and has_image_processor(folder)
    processor = load_image_processor(folder) if reads_images else None
    generation = GenerationConfig.load(folder) if isinstance(model, EncoderDecoderModule) else None
    return LanguageModel(
        model, load_tokenizer(folder, model.spec), context, generation=generation, image_processor=processor,
        extra_files=model_folder.read_extra_files(folder), source_family=model_folder.read_source_family(folder),
    )  # fmt: skip


def resolve_device(name: str) -> str:
    """The device's name; `auto` is the GPU if there is one. Raises ValueError if this machine lacks the device.

    Turns TF32 off in cuDNN, where it is on by default, so that float32 convolutions are computed in float32.
    """
    torch.backends.cudnn.allow_tf32 = False
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError):  # AssertionError: a torch that was built without CUDA
        available = ["auto", "cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        raise ValueError(f"there is no device {name!r} here; choose one of {', '.join(available)}") from None
    return name
