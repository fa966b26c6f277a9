"""The engine: generates for many requests at once, one step at a time.

    engine = Engine(model)
    request = engine.submit(ids, Sampling(max_new=40, temperature=0))
    while not engine.idle:
        for request, token in engine.step(): ...

The tokens of a request do not depend on other requests, the store, chunk sizes or preemption, up to rounding: products
of different sizes add the same numbers in different orders, with `batch_invariant` in one order. The engine handles
token ids only. A request to an encoder-decoder has a source too. The sources of a batch are padded to the longest and
encoded in the forward of the first target tokens. The engine is not thread-safe: use it from one thread.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor, nn

from regard.adapt.batch_invariant import check_batch_invariant, keep_all_tokens
from regard.adapt.lora_weights import LoraWeights
from regard.engine.adapters import Adapters
from regard.engine.beam import Beam, Beams, BeamSearch
from regard.engine.caches import Cache, checked_cache
from regard.engine.contrastive import ContrastiveOptions, ContrastiveSearch
from regard.engine.inputs import (
    SourceInput,
    check_size,
    check_states,
    checked_store,
    decoder_of,
    encoder_capacity,
)
from regard.engine.memory import open_store
from regard.engine.namespace import model_version, namespace_of
from regard.engine.request import (
    GenerationError,
    PromptEmbeddings,
    QueueFull,
    Request,
    RequestOptions,
    Sampling,
    Token,
    derived_seed,
)
from regard.engine.request_builder import RequestBuilder
from regard.engine.runner import Runner
from regard.engine.sampling import Sampled, sample
from regard.engine.scheduler import ScheduledBatch, Scheduler
from regard.engine.searches import Searches
from regard.engine.speculation.speculation import Drafter, open_speculation
from regard.engine.stores.base import OpenStore
from regard.models.encoder_decoder import EncoderDecoderModule

TokenIds = Sequence[int]
WARM_UP_PROMPTS = ((16,), (33,), (1040,), (2049,), (48, 17), (700, 1024))  # requests that are prefilled in one batch
CHUNKS = {"cpu": 256, "cuda": 8192}  # as many as do not delay the tokens of other requests noticeably


class Engine:
    def __init__(
        self,
        model: nn.Module,  # a decoder, or a model that has one: an encoder-decoder, or image and text
        *,
        rows: int | None = None,  # requests that are decoded at once; None: 32 on a CPU, 256 on a GPU, or what fits
        capacity: int | None = None,  # prompt and new tokens per request; None: the limit of the model
        source_capacity: int | None = None,  # tokens per source of an encoder-decoder; None: the encoder's context
        store: str | OpenStore = "paged",  # a name, or a constructor, such as partial(Paged, blocks=64)
        cache: str | Cache | None = None,  # a smaller cache: "int8", "sinks:4+1020", "h2o:512" …; None: all tokens
        memory: float | None = None,  # share of the device's memory for the store; None: 0.25 on a CPU, 0.8 on a GPU
        chunk: int | None = None,  # tokens per step: prompts are computed in chunks; None: 256 on a CPU, 8192 on a GPU
        queue: int = 256,  # waiting requests
        prefix_cache: bool = True,  # requests that start with the same tokens share what is computed for them
        compile: bool = False,  # prepare decode steps: slow to start, then fast; ignores later hooks and modules
        batch_invariant: bool = False,  # logits are bitwise independent of other requests and chunks; slower, GPUs only
        max_loras: int = 8,  # adapters that requests which run at the same time may have
        max_cpu_loras: int = 64,  # adapters that may be loaded; 0: none
        speculation: Drafter | None = None,  # proposes tokens, several of which are verified in one forward
        draft_tokens: int = 5,  # at most so many per request and forward
    ):
        decoder = decoder_of(model)
        self.encoder_decoder = model if isinstance(model, EncoderDecoderModule) else None
        self.source_capacity = encoder_capacity(self.encoder_decoder, source_capacity)
        weight, states = next(decoder.parameters()), decoder.spec.memory()
        self.device = weight.device
        self.cache = checked_cache(cache, decoder.spec, batch_invariant, compile)
        capacity = self.cache.capacity(decoder.spec, capacity)
        chunk = CHUNKS.get(self.device.type, CHUNKS["cpu"]) if chunk is None else chunk
        sizes = {"chunk": chunk, "queue": queue, "max_loras": max_loras, "max_cpu_loras": max_cpu_loras or 1}
        for name, size in (sizes if rows is None else sizes | {"rows": rows}).items():
            check_size(name, size)
        check_states(decoder.spec, has_source=self.encoder_decoder is not None)
        if batch_invariant:
            check_batch_invariant(model, weight)
            states = keep_all_tokens(states)
        states, store = self.cache.declare(states), self.cache.store(checked_store(store))
        self.store = open_store(store, states, rows, capacity, weight.dtype, self.device, self.source_capacity, memory)
        model.eval()
        self.model, self.capacity, self.queue = decoder, self.store.max_tokens, queue
        self.runner = Runner(decoder, self.encoder_decoder, self.store, batch_invariant)
        if compile:
            self.runner.compile()
        self.loras = Adapters(model, self.runner, max_loras, max_cpu_loras, compile)
        self.requests = RequestBuilder(decoder, self.encoder_decoder, self.capacity, self.source_capacity, self.loras)
        namespace, chunk = self.namespace if prefix_cache else None, min(chunk, self.cache.max_chunk)
        self.scheduler = Scheduler(self.store, chunk, namespace, self.read_tokens, self.loras.can_run)
        self.speculation = open_speculation(speculation, draft_tokens, self.scheduler, self.runner)
        # Steps whose tokens are not read yet when the next starts; a draft depends on all tokens.
        self.lag = 1 if self.device.type == "cuda" and speculation is None else 0
        self.unread: deque[tuple[int, list[Request], Sampled]] = deque()  # by step
        self.produced: list[tuple[Request, Token]] = []  # tokens that no step has returned yet
        self.in_step, self.to_cancel = False, list[Request]()
        self.version: tuple[int | None] | None = None  # of the model in this step; None: not computed yet
        self.searches = Searches()
        self.arrivals = count()
        self.counts = Counter(steps=0, prompt_tokens=0, new_tokens=0, stop=0, length=0, cancelled=0, timeout=0, error=0)

    def submit(
        self,
        ids: TokenIds,
        sampling: Sampling,
        source: SourceInput | None = None,
        embeddings: Tensor | PromptEmbeddings | None = None,
        **options: Unpack[RequestOptions],
    ) -> Request:
        """Append a request to the queue. ValueError if it can never run, QueueFull if too many requests wait.

        source: ids that an encoder reads, or a signal (C, frames). embeddings: (len(ids), D) of the prompt, or the
        result of `prompt_embeddings`. The fields of RequestOptions: salt, priority, tenant, deadline, adapter.
        """
        return self.submit_n(ids, sampling, 1, source, embeddings, **options)[0]

    def submit_n(
        self,
        ids: TokenIds,
        sampling: Sampling,
        n: int,
        source: SourceInput | None = None,
        embeddings: Tensor | PromptEmbeddings | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Request]:
        """Submit n requests with the same prompt, all or none; where the store shares prefixes, it is computed once.

        Request i has the seed (seed + i) mod 2**64, or a random one if `sampling` has none. Arguments as for `submit`.
        """
        check_size("n", n)
        if len(self.scheduler.running) + len(self.scheduler.waiting) + n > self.max_requests:
            raise QueueFull(f"{self.queue} requests may wait, too few for {n} more; try again later")
        if isinstance(embeddings, Tensor):
            embeddings = self.prompt_embeddings(ids, embeddings)
        requests = [
            self.requests.build(
                ids, replace(sampling, seed=derived_seed(sampling.seed, i)), source, embeddings, **options
            )
            for i in range(n)
        ]
        for request in requests:
            request.arrival = next(self.arrivals)
            self.scheduler.add(request)
            self.counts["prompt_tokens"] += request.source_length or len(request.ids)
        return requests

    def prompt_embeddings(self, ids: TokenIds, embeddings: Tensor) -> PromptEmbeddings:
        """The embeddings (len(ids), D) of a prompt on the host, with the keys of its cached prefixes, for `submit`.

        Requests with the same prompt can share the result. Thread-safe: the keys of a long prompt need not be computed
        in the thread of the engine.
        """
        return self.requests.embeddings(ids, embeddings)

    @torch.inference_mode()
    def cancel(self, request: Request) -> None:
        """End a request; no effect if it has finished. Called by a logits processor, it waits for the step to end."""
        if request.finish is not None:
            return
        if request not in self.scheduler.running and request not in self.scheduler.waiting:
            raise ValueError("the request was not submitted to this engine; cancel it in the engine that runs it")
        if self.in_step:
            self.to_cancel.append(request)
        else:
            self.end(request, "cancelled")

    @torch.inference_mode()
    def step(self) -> list[tuple[Request, Token]]:
        """Run one step. Returns new tokens: on a CPU those of this step, on a GPU mostly those of the step before.

        On a GPU scheduling is asynchronous: the tokens of a step stay on the device as inputs of the next one, and are
        read after that has started. A request that fails has finish="error" and a message in `error`.
        """
        for request in self.scheduler.expired():
            self.end(request, "timeout")
        self.in_step, self.version = True, None
        try:
            if self.searches.queue:
                self.searches.advance()
            batches = self.scheduler.plan()
            for batch in batches:
                self.run_batch(batch)
        finally:
            self.in_step = False
        waits = not batches or any(request.sampling.reads_tokens for request in self.scheduler.running)
        read = self.read_tokens(0 if waits else self.lag)  # may free rows, which `plan` did not have
        stuck = not (batches or read or self.scheduler.running or self.searches.queue)
        if stuck and (request := self.scheduler.waiting.first()):
            needed = f"the store has no space for the {len(request.tokens)} tokens of this request"
            self.end(request, "error", f"{needed}, although no request is running; open a larger store")
        while self.to_cancel:
            self.cancel(self.to_cancel.pop())
        self.counts["steps"] += 1
        produced, self.produced = self.produced, []
        return produced

    def run_batch(self, batch: ScheduledBatch) -> None:
        try:
            if self.speculation is not None and self.speculation.handles(batch):
                self.speculation.step(batch, self.forward, self.add)
            else:
                self.advance(batch, self.forward(batch))
        except (RuntimeError, IndexError) as error:  # also of sampling: its buffers need memory too
            self.handle_failure(batch, error)

    def generate(
        self,
        ids: TokenIds,
        sampling: Sampling,
        source: SourceInput | None = None,
        embeddings: Tensor | None = None,
        *,
        adapter: str | None = None,
    ) -> list[Token]:
        """Generate until this request is finished; other submitted requests run too. Arguments as for `submit`."""
        request = self.submit(ids, sampling, source, embeddings, adapter=adapter)
        try:
            while request.finish is None:
                self.step()
        finally:
            self.cancel(request)
        if request.error is not None:
            raise GenerationError(request.error)
        return request.new

    def beam_search(
        self,
        ids: TokenIds,
        beams: Beams,
        sampling: Sampling,
        source: SourceInput | None = None,
        embeddings: Tensor | None = None,
        *,
        adapter: str | None = None,
    ) -> list[Beam]:
        """The best sequences, best first; other submitted requests run too. Arguments as for `submit`."""
        first = self.requests.build(ids, sampling, source, embeddings, adapter=adapter)
        search = BeamSearch(self.scheduler, self.forward, self.model.spec.vocab, self.capacity)
        return self.searches.run(search.start(first, beams), self.step)

    def contrastive_search(
        self, ids: TokenIds, settings: ContrastiveOptions, sampling: Sampling, *, adapter: str | None = None
    ) -> list[Token]:
        """The new tokens of a decoder; other submitted requests run too. Arguments as for `submit`."""
        if self.encoder_decoder is not None:
            raise ValueError("contrastive search is for decoders; use beam_search with an encoder-decoder")
        request = self.requests.build(ids, sampling, adapter=adapter)

        def model() -> nn.Module:
            chosen = request.adapter
            return self.model if chosen is None else self.loras.decoder_with(chosen, self.scheduler.running)

        search = ContrastiveSearch(self.scheduler, model, self.device, self.capacity)
        return self.searches.run(search.start(request, settings), self.step)

    def load_adapter(self, name: str, adapter: str | Path | LoraWeights) -> None:
        """Load a LoRA adapter, which requests can then name. Requests that are running go on.

        adapter: its folder, by regard or PEFT, or its weights (`lora_weights(model)`). AdapterError if it does not fit
        the model. Hooks and modules that are added to the model later have no effect on requests with adapters.
        """
        self.loras.load(name, adapter if isinstance(adapter, LoraWeights) else self.read_adapter(adapter))

    def read_adapter(self, folder: str | Path, source_family: str | None = None) -> LoraWeights:
        """The adapter of a folder, checked, for `load_adapter`; thread-safe. Arguments as for `Adapters.read`."""
        return self.loras.read(folder, source_family)

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Requests that have it already finish with it."""
        self.loras.unload(name)

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the loaded adapters."""
        return tuple(self.loras.loaded)

    def forward(self, batch: ScheduledBatch) -> Tensor:
        if any(request.adapter is not None for request, _ in batch):
            return self.loras.forward(batch, self.scheduler.running)
        return self.runner.forward(batch)

    @property
    def max_requests(self) -> int:
        """Requests that may run or wait at a time."""
        return self.store.rows + self.queue

    @property
    def idle(self) -> bool:
        return not (self.scheduler.running or self.scheduler.waiting or self.searches.queue)

    def metrics(self) -> dict[str, float]:
        running, waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        numbers = {"rows": self.store.rows, "running": running, "waiting": waiting, **self.counts}
        cached = self.cache.metrics(self.store, ((r.cached, len(r.ids)) for r in self.scheduler.running))
        drafts = self.speculation.statistics.metrics() if self.speculation is not None else {}
        return numbers | self.store.metrics() | cached | {"preemptions": self.scheduler.preemptions} | drafts

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes. Needed only if weights have changed in a way that torch does not record."""
        self.store.forget()

    def warm_up(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Prepare decode steps of all sizes, also of loaded adapters, now instead of when they are needed.

        progress(done, all)
        """
        self.runner.warm_up(progress)
        self.loras.warm_up(progress)
        if self.runner.graphs is not None and self.encoder_decoder is None and self.idle:
            self.warm_up_prompts()

    def warm_up_prompts(self) -> None:
        """Compile the kernels that read prompts, by requests that are neither counted nor cached."""
        counts, shares = self.counts.copy(), self.scheduler.shares
        self.scheduler.shares = False
        try:
            for lengths in WARM_UP_PROMPTS:
                for length in lengths[: self.store.rows]:
                    self.submit([0] * max(1, min(length, self.capacity - 2)), Sampling(max_new=2, top_p=0.9))
                while not self.idle:
                    self.step()
        finally:
            self.counts, self.scheduler.shares = counts, shares

    def namespace(self, request: Request) -> object:
        """Called inside of a step, in which the version of the model, which takes long to compute, does not change."""
        if self.version is None:
            self.version = (model_version(self.model),)
        return namespace_of(request, *self.version)

    def advance(self, batch: ScheduledBatch, logits: Tensor) -> None:
        """Sample the next token of every request of the batch that has no pending tokens left."""
        if ready := self.scheduler.advance(batch):
            sampled = sample(logits, ready, separately=self.runner.batch_invariant)
            self.runner.keep_last(ready, sampled.ids)
            self.unread.append((self.counts["steps"], ready, sampled))
            for request in ready:
                request.unread += 1

    def read_tokens(self, lag: int = 0) -> bool:
        """Read the tokens of all steps but the last `lag`; False if there are none."""
        found = False
        while self.unread and self.unread[0][0] <= self.counts["steps"] - lag:
            _, requests, sampled = self.unread.popleft()
            for request, token in zip(requests, sampled.read(), strict=True):
                if request.finish is None:  # else it is a token after the last
                    request.unread -= 1
                    self.add(request, token)
            found = True
        return found

    def add(self, request: Request, token: Token | str) -> None:
        """Append a token to a request, or end the request for the reason why it has none."""
        if isinstance(token, str):
            return self.end(request, "error", token)
        finish = request.finish_reason(token.id)
        if finish is not None:
            token = token._replace(finish=finish)
        request.add(token)
        self.produced.append((request, token))
        self.counts["new_tokens"] += 1
        if finish is not None:
            self.scheduler.commit(request)
            self.end(request, finish)

    def handle_failure(self, batch: ScheduledBatch, error: Exception) -> None:
        """End the request of a failed forward; if it had several, or drafts, preempt them: each is recomputed alone."""
        self.read_tokens()
        ran_alone = len(batch) == 1 and (self.speculation is None or batch[0][0].isolated)
        for request in [request for request, _ in batch if request.finish is None]:
            if ran_alone:
                self.end(request, "error", f"the model failed on this request: {str(error).splitlines()[0]}")
            else:
                request.isolated = True
                self.scheduler.preempt(request)

    def end(self, request: Request, finish: str, error: str | None = None) -> None:
        request.finish, request.error = finish, error
        self.counts[finish] += 1
        self.scheduler.remove(request)
