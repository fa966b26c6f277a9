"""A model with its tokenizer, for use from Python in one line.

    llm = regard.load("smollm2")
    llm.generate("The three primary colours are")
    llm.load_adapter("pirate", "runs/pirate"); llm.generate("Hello", adapter="pirate")
    llm.chat([{"role": "user", "content": "Name a primary colour."}])
    for text in llm.stream("Once upon a time"): print(text, end="")
    await llm.agenerate(["a prompt", "another one"])      achat, astream and aembed too
    regard.load("models/t5").generate("translate English to German: a cat")
    regard.load("models/llava").generate("USER: <image> What is it? ASSISTANT:", images=["picture.png"])
    regard.load("minilm").embed(["a cat", "a kitten"])
    regard.load("models/whisper").transcribe("speech.wav").text
    regard.load("runs/classify").classify(["a good film", ("a premise", "a hypothesis")])

Its attributes can also be used separately: `model` (an nn.Module), `tokenizer` and `engine`.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Unpack

from torch import Tensor, nn

from regard.adapt.lora_weights import LoraWeights
from regard.adapt.quantized import count_stored_weights
from regard.checkpoint.image_processor import ImageProcessor, Images, image_list, images_per_prompt
from regard.engine.engine import Engine
from regard.engine.grammar import GrammarCompiler
from regard.engine.inputs import check_context, context_limit, decoder_of
from regard.engine.request import Request, RequestOptions, Sampling, Token
from regard.image_prompts import embed_prompt
from regard.models.encoder_decoder import EncoderDecoderModule
from regard.models.interleaved import InterleavedModule
from regard.predictions import classify
from regard.speech.transcribe import speech_model, transcribe
from regard.speech.transcription import AudioInput, TranscriptionOptions
from regard.text.chat import encode_chat, is_conversation, refused_variable
from regard.text.detokenizer import TextStream
from regard.text.tokenizer import Tokenizer
from regard.text.tokenizer_folder import GenerationConfig
from regard.text.tools import assistant_message, require_tool_style
from regard.text.vocabulary import token_bytes
from regard.text_embedding import embed
from regard.text_generation import Prompt, SamplingOptions, TextGenerator, checked_sampling
from regard.training.base_model import check_base, warn_of_other_base
from regard.training.run import newest_checkpoint

ChatMessages = Sequence[Mapping[str, Any]]  # [{"role": "user", "content": "…"}, …]
ChatTools = Sequence[Mapping[str, Any]]  # [{"type": "function", "function": {"name": "…", "parameters": {…}}}, …]
StopStrings = str | Sequence[str]


class LanguageModel:
    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        context: int | None = None,
        rows: int | None = None,
        generation: GenerationConfig | None = None,
        image_processor: ImageProcessor | None = None,
        extra_files: Mapping[str, bytes] | None = None,
        source_family: str | None = None,
    ):
        """context: maximum number of tokens; None: the model's context. It limits the sum of prompt and answer, for an
        encoder-decoder each of the two.

        rows: prompts generated at once; None: as the engine chooses. generation: for encoder-decoders. image_processor:
        for models that read images. extra_files, source_family: written by `regard.save` (checkpoint/model_folder.py).
        """
        if context is not None:
            check_context(context, model)
        self.model: Any = model.eval()
        self.tokenizer = tokenizer
        self.context, self.rows = context, rows
        self.generation, self.image_processor = generation or GenerationConfig(), image_processor
        self.extra_files, self.source_family = extra_files or {}, source_family
        self.folder: Path | None = None  # from which the model was loaded

    def __repr__(self) -> str:
        first = next(self.model.parameters())
        count = sum(parameter.numel() for parameter in self.model.parameters()) + count_stored_weights(self.model)
        source = self.model.spec.kind if self.folder is None else f"{str(self.folder)!r}, {self.model.spec.kind}"
        context = self.context or context_limit(self.model)
        dtype = str(first.dtype).removeprefix("torch.")
        return f"LanguageModel({source}, parameters={count:,}, {dtype} on {first.device}, context={context})"

    @cached_property
    def engine(self) -> Engine:
        return Engine(self.model, rows=self.rows, capacity=self.context, source_capacity=self.context)

    @cached_property
    def texts(self) -> TextGenerator:
        return TextGenerator(self.engine)

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Compiles what `grammar` can be: `llm.generate(prompt, grammar=llm.grammars.regex("[0-9]+"))`."""
        vocab = decoder_of(self.model).spec.vocab
        return GrammarCompiler(token_bytes(self.tokenizer), self.tokenizer.stop_ids, vocab)

    @property
    def continues_prompt(self) -> bool:
        """Whether the generated text continues the prompt: always, except for an encoder-decoder."""
        return not isinstance(self.model, EncoderDecoderModule)

    def generate(
        self,
        prompt: str | Sequence[str],
        *,
        images: "Images | Sequence[Images]" = (),
        stop: StopStrings = (),
        **sampling: Unpack[SamplingOptions],
    ) -> Any:
        """The generated text: the continuation of a prompt, or the output of an encoder-decoder for it.

        Several prompts are decoded in one batch and return a list. images: the image of the prompt, or the images in
        the order of its image tokens; for several prompts, one sequence of images per prompt. stop: strings at which
        the text ends; they are not part of it. The other options are the fields of `Sampling`, and `adapter`, the name
        of an adapter that `load_adapter` has loaded.
        """
        texts = self.texts.generate(self.prompts(prompt, images, stop, sampling))
        return texts[0] if isinstance(prompt, str) else texts

    async def agenerate(
        self,
        prompt: str | Sequence[str],
        *,
        images: "Images | Sequence[Images]" = (),
        stop: StopStrings = (),
        **sampling: Unpack[SamplingOptions],
    ) -> Any:
        """`generate` for asyncio: requests that are awaited at the same time are decoded in one batch."""
        texts = await self.texts.generate_async(self.prompts(prompt, images, stop, sampling))
        return texts[0] if isinstance(prompt, str) else texts

    def chat(
        self,
        messages: str | ChatMessages | Sequence[str | ChatMessages],
        *,
        images: "Images | Sequence[Images]" = (),
        stop: StopStrings = (),
        tools: ChatTools = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Any:
        """The answer to a conversation, formatted by the model's chat template; a string is one user message.

        Several conversations, a list of strings or of lists of messages, are decoded in one batch and return a list.
        tools: functions that the model may call; an answer is a message then, whose `tool_calls` are its calls, if any.
        chat_template_kwargs: variables of the chat template, such as {"enable_thinking": False}.
        """
        prompts = self.conversations(messages, images, stop, sampling, tools, chat_template_kwargs)
        texts = self.texts.generate(prompts)
        return self.answers(messages, texts, tools)

    async def achat(
        self,
        messages: str | ChatMessages | Sequence[str | ChatMessages],
        *,
        images: "Images | Sequence[Images]" = (),
        stop: StopStrings = (),
        tools: ChatTools = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Any:
        """`chat` for asyncio."""
        prompts = self.conversations(messages, images, stop, sampling, tools, chat_template_kwargs)
        texts = await self.texts.generate_async(prompts)
        return self.answers(messages, texts, tools)

    def stream(
        self,
        prompt: str | ChatMessages,
        *,
        images: Images = (),
        stop: StopStrings = (),
        **sampling: Unpack[SamplingOptions],
    ) -> Iterator[str]:
        """The text in chunks as it is generated: the continuation of a string, or the answer to messages."""
        for _, text in self.stream_tokens(prompt, images=images, stop=stop, **sampling):
            if text:
                yield text

    async def astream(
        self,
        prompt: str | ChatMessages,
        *,
        images: Images = (),
        stop: StopStrings = (),
        **sampling: Unpack[SamplingOptions],
    ) -> AsyncIterator[str]:
        """`stream` for asyncio. The request is cancelled when the iteration ends early."""
        ids = self.encode(prompt) if isinstance(prompt, str) else self.encode_chat(prompt)
        tokens = self.texts.stream_async(self.prompt(ids, images, stop, isinstance(prompt, str), sampling))
        async with aclosing(tokens):
            async for _, text in tokens:
                if text:
                    yield text

    def stream_tokens(
        self,
        prompt: str | ChatMessages,
        *,
        images: Images = (),
        stop: StopStrings = (),
        **sampling: Unpack[SamplingOptions],
    ) -> "Iterator[tuple[Token, str]]":
        """Every token with the text that it completes, which is often empty."""
        ids = self.encode(prompt) if isinstance(prompt, str) else self.encode_chat(prompt)
        return self.submit(ids, stop, isinstance(prompt, str), sampling, images)

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Load a LoRA adapter, by regard or PEFT, beside others: `generate(…, adapter=name)` uses it.

        Prompts with different adapters are decoded in one batch. The model itself does not change.
        """
        weights = self.read_adapter(path)
        with self.texts.lock:
            self.engine.load_adapter(name, weights)

    def read_adapter(self, path: str | Path) -> LoraWeights:
        """The adapter of a run or folder, checked, for `Engine.load_adapter`."""
        folder = newest_checkpoint(path)
        if self.folder is not None:
            check_base(folder, self.folder)
            warn_of_other_base(folder, self.folder)
        return self.engine.read_adapter(folder, self.source_family)

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter; requests that have it already finish with it."""
        with self.texts.lock:
            self.engine.unload_adapter(name)

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters that `load_adapter` has loaded."""
        return self.engine.adapters

    def embed(self, texts: str | Sequence[str]) -> Tensor:
        """(N, D) unit vectors, one per text; for a single string (D,). Texts are truncated to the model's context.

        The embedding is the output of an encoder's pooling head, or the mean of the hidden states: those of an encoder
        without a head, or the input of a decoder's head.
        """
        vectors = embed(self.model, self.tokenizer, [texts] if isinstance(texts, str) else texts, self.context)
        return vectors[0] if isinstance(texts, str) else vectors

    async def aembed(self, texts: str | Sequence[str]) -> Tensor:
        """`embed` for asyncio, computed in another thread."""
        return await asyncio.to_thread(self.embed, texts)

    def classify(self, inputs: Any) -> Any:
        """The Prediction of a text, of a pair (a tuple of two texts) or of an image file; of a list, a list of them.

        The model needs a classification head. It gives a label and the probabilities of all labels, a head with one
        output a `value`, and a head for words a list with a Prediction for each word (text.split()).
        """
        single = not isinstance(inputs, list)
        found = classify(self.model, self.tokenizer, [inputs] if single else inputs, self.context, self.image_processor)
        return found[0] if single else found

    def transcribe(self, audio: AudioInput | Sequence[AudioInput], **options: Unpack[TranscriptionOptions]) -> Any:
        """The Transcription of a WAV file, or of samples at 16 kHz, by a Whisper model; of a list, a list of them.

        It has the text, its segments (start, end, text) and the language. Options: the fields of
        `TranscriptionSettings`, such as language="de", task="translate", timestamps=True and prompt="Names: …".
        """
        model = speech_model(self.model, self.tokenizer, self.engine)
        return transcribe(model, self.engine, self.texts.lock, audio, options)

    def encode(self, prompt: str, special: bool = True) -> list[int]:
        """The ids of a prompt after the tokenizer's prefix ids; for an encoder-decoder with all its special tokens.

        special: special tokens in the prompt, such as <|user|>, become their ids.
        """
        if isinstance(self.model, EncoderDecoderModule):
            return self.tokenizer.encode_with_special_tokens(prompt, special=special)
        return [*self.tokenizer.prefix_ids, *self.tokenizer.encode(prompt, special)]

    def answers(self, messages: Any, texts: list[str], tools: ChatTools) -> Any:
        template = self.tokenizer.chat_template
        found = [assistant_message(text, template, tools) for text in texts] if tools else texts
        return found[0] if is_conversation(messages) else found

    def encode_chat(
        self, messages: str | ChatMessages, tools: ChatTools = (), variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """variables: of the chat template."""
        conversation = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        if wrong := [message for message in conversation if not isinstance(message, Mapping)]:
            raise ValueError(f"{wrong[0]!r} is not a message; a conversation is a list of {{'role': …, 'content': …}}")
        if tools:
            require_tool_style(self.tokenizer.chat_template)
        if variables and (refusal := refused_variable(self.tokenizer, variables)):
            raise ValueError(f"chat_template_kwargs: {refusal}")
        messages = [dict(message) for message in conversation]
        return encode_chat(self.tokenizer, messages, tools=tools or None, variables=variables)

    def prompts(
        self, prompt: str | Sequence[str], images: Any, stop: StopStrings, options: SamplingOptions
    ) -> list[Prompt]:
        texts = [prompt] if isinstance(prompt, str) else prompt
        if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"the prompt {prompt!r:.100} is no text; give a string, or a list of strings")
        image_lists: Sequence[Any] = [images] if isinstance(prompt, str) else images_per_prompt(images, len(texts))
        pairs = zip(texts, image_lists, strict=True)
        return [self.prompt(self.encode(text), images, stop, True, options) for text, images in pairs]

    def conversations(
        self, messages: Any, images: Any, stop: StopStrings, options: SamplingOptions, tools: ChatTools,
        variables: Mapping[str, Any] | None,
    ) -> list[Prompt]:  # fmt: skip
        single = is_conversation(messages)
        conversations = [messages] if single else messages
        image_lists: Sequence[Any] = [images] if single else images_per_prompt(images, len(conversations))
        pairs = zip(conversations, image_lists, strict=True)
        return [
            self.prompt(self.encode_chat(each, tools, variables), images, stop, False, options)
            for each, images in pairs
        ]

    def prompt(
        self, ids: list[int], images: Images, stop: StopStrings, continues_prompt: bool, options: SamplingOptions
    ) -> Prompt:
        """Ids that can be submitted. continues_prompt: the text continues the text of the ids, unlike an answer."""
        sampling = checked_sampling(options, self.tokenizer.stop_ids)
        continues = continues_prompt and self.continues_prompt

        def text_stream(request: Request) -> TextStream:
            return TextStream(self.tokenizer, stop, prompt_ids=request.ids if continues else ())

        submit = partial(self.submit_ids, images=images, adapter=options.get("adapter"))
        return Prompt(ids, sampling, submit, text_stream)

    def submit(
        self,
        ids: list[int],
        stop: StopStrings,
        continues_prompt: bool,
        options: SamplingOptions,
        images: Images = (),
    ) -> "Iterator[tuple[Token, str]]":
        """Submit a request at once, and return an iterator over its tokens and their text."""
        prompt = self.prompt(ids, images, stop, continues_prompt, options)
        request = self.texts.submit(prompt)
        return self.texts.stream(request, prompt.text_stream(request))

    def submit_ids(
        self, ids: Sequence[int], sampling: Sampling, images: Images = (), adapter: str | None = None
    ) -> Request:
        """Submit the ids of a prompt: the source of an encoder-decoder, for other models the prompt of the decoder."""
        if isinstance(self.model, InterleavedModule):
            ids, embeddings = embed_prompt(self.model, self.tokenizer, self.image_processor, list(ids), images)
            return self.engine.submit(ids, sampling, embeddings=embeddings, adapter=adapter)
        if image_list(images):
            raise ValueError(f"this model is of kind {self.model.spec.kind} and reads no images; leave them out")
        if isinstance(self.model, EncoderDecoderModule):
            return self.submit_source(ids, sampling, adapter=adapter)
        return self.engine.submit(ids, sampling, adapter=adapter)

    def submit_source(self, ids: Sequence[int], sampling: Sampling, **options: Unpack[RequestOptions]) -> Request:
        """Submit the source of an encoder-decoder; the generation config sets the output's start and end tokens."""
        settings = self.generation
        sampling = replace(
            sampling, suppress_ids=settings.suppress_tokens, forced_bos_id=settings.forced_bos_token_id,
            forced_eos_id=settings.forced_eos_token_id,
        )  # fmt: skip
        return self.engine.submit([self.decoder_start], sampling, ids, **options)

    @property
    def decoder_start(self) -> int:
        """The id before the output of an encoder-decoder."""
        given = self.generation.decoder_start_token_id
        start = self.tokenizer.bos if given is None else given
        if start is None:
            raise ValueError("no token starts the output; set decoder_start_token_id in generation_config.json")
        return start
