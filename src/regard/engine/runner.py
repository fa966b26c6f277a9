"""The runner: forwards of the engine's batches, eagerly, compiled, or by CUDA graphs.

A decode batch, one token per request, can be prepared: on a CPU by torch.compile, for one row and for several, or by
one kernel for all layers if their weights are packed (adapt/packed_decode.py); on a GPU by CUDA graphs of a few
sizes (decode_graphs.py), also with a draft per request. All other batches, which read prompts, run eagerly. A graph
sees weights that change in place, but not modules that are replaced or hooks that are added after its capture.
"""

import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from regard.adapt.batch_invariant import make_batch_invariant
from regard.adapt.cpu_decode import optimize_for_cpu_decode
from regard.adapt.gpu_decode import optimize_for_gpu_decode
from regard.adapt.packed_decode import PackedStack, fuse_packed_stack
from regard.compat import COMPILE_OPTIONS, allow_recompiles, cannot_compile
from regard.engine.decode_graphs import CannotCapture, DecodeGraphs, Step, decode_size
from regard.engine.inputs import pad_sources
from regard.engine.prompt_logprobs import record_prompt_logprobs
from regard.engine.request import UNREAD, Request
from regard.engine.scheduler import ScheduledBatch
from regard.engine.stores.base import Store
from regard.engine.stores.paged import Paged
from regard.layout import TokenLayout, to_device
from regard.models.decoder import DecoderModule
from regard.models.encoder_decoder import EncoderDecoderModule

# For torch.compile on a CPU: an input of several sums is computed once, not in each; at most two sums share a loop,
# since two streams read memory fastest; sizes that guards have checked are not asserted again.
CPU_COMPILE_OPTIONS: dict[str, Any] = {
    "realize_reads_threshold": 0,
    "cpp.max_horizontal_fusion_size": 2,
    "size_asserts": False,
}
SPAN = 64  # slots
ReadStream = Callable[[ScheduledBatch, Tensor], None]  # (batch, residual stream after the last block (B, L, D))


class Runner:
    def __init__(
        self,
        model: DecoderModule,
        encoder_decoder: EncoderDecoderModule | None,
        store: Store,
        batch_invariant: bool = False,
        before_forward: Callable[[ScheduledBatch, bool], None] = lambda batch, prepared: None,
    ):
        """before_forward(batch, prepared). prepared: a decode step over the first rows of the store."""
        if batch_invariant and not isinstance(store, Paged):
            raise ValueError(f"batch_invariant needs the paged store, not {type(store).__name__}; leave the store out")
        self.model = make_batch_invariant(model) if batch_invariant else model
        self.encoder_decoder, self.store, self.batch_invariant = encoder_decoder, store, batch_invariant
        self.before_forward = before_forward
        self.device = next(model.parameters()).device
        self.plain = self.model  # without the changes of `compile`, which calls no hooks
        self.observers: list[Callable[[ScheduledBatch], None]] = []  # called before forwards, which then run eagerly
        self.read_stream: ReadStream | None = None  # called with the result of forwards, which then run eagerly
        self.last = torch.zeros(store.rows, dtype=torch.int64, device=self.device)  # the last sampled id of each row
        self.compiled: Step | None = None
        self.graphs: DecodeGraphs | None = None
        self.graphs_of_drafts = True  # False: steps of several tokens per row cannot be captured

    def compile(self) -> None:
        """Prepare decode batches. Where that is impossible, they run eagerly, and a warning gives the reason."""
        fused = fuse_packed_stack(self.model) if reads_pages(self.store) else None
        if fused is not None:  # one kernel computes all layers, so that there is nothing to compile
            self.model = fused
            return
        reason = cannot_compile(self.device)
        if reason is not None:
            warnings.warn(reason, stacklevel=3)
        elif self.device.type == "cuda":
            if not self.batch_invariant:  # else it is optimized already, without torch.compile
                fuse = next(self.model.parameters()).dtype in (torch.bfloat16, torch.float16)
                self.model = optimize_for_gpu_decode(self.model, fuse)
            self.graphs = DecodeGraphs(self.decode_step, self.store.rows, self.device)
        else:
            self.model = optimize_for_cpu_decode(self.model)
            self.compiled = self.compile_step()

    @torch.inference_mode()
    def compile_step(self) -> Callable[..., Tensor] | None:
        """The compiled decode step; None if torch cannot compile it."""
        options = dict(CPU_COMPILE_OPTIONS)
        if COMPILE_OPTIONS:  # the code is for this model only, a copy whose modules do not change: 1 ms less per step
            options["guard_filter_fn"] = torch.compiler.skip_guard_on_all_nn_modules_unsafe
        compiled = torch.compile(self.decode_step, fullgraph=True, options=options, **COMPILE_OPTIONS)
        return compiled if self.try_compiled(compiled, self.span(1)) else None

    def try_compiled(self, step: Step, span: int) -> bool:
        """Run a compiled step on empty rows, one and several; False, with a warning, if torch cannot compile it."""
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException  # seconds to import
        from torch._inductor.exc import InductorError

        try:
            for rows in sorted({1, self.store.rows}):
                tokens, positions, valid = torch.zeros(3, rows, 1, dtype=torch.long, device=self.device)
                inputs = (tokens, positions, valid.bool())
                for tensor in inputs if rows > 1 else ():  # compiled once for any number of rows from two
                    torch._dynamo.maybe_mark_dynamic(tensor, 0)
                with allow_recompiles():
                    step(*inputs, span)
        except (TorchDynamoException, FailOnRecompileLimitHit, InductorError) as error:
            reason = str(error).partition("\n")[0]
            warnings.warn(f"torch.compile cannot compile the decode step ({reason}); decoding eagerly", stacklevel=5)
            return False
        return True

    @property
    def has_cpu_step(self) -> bool:
        """Whether decode steps of a CPU are compiled, or one kernel."""
        return self.compiled is not None or isinstance(self.model.stack, PackedStack)

    def forward(self, batch: ScheduledBatch) -> Tensor:
        """Run a batch; returns the logits (N, V) of the N requests that have no pending tokens after it.

        A request with a draft of k tokens has k + 1 rows: one after its last token, and one after each of the draft.
        """
        batch.sort(key=lambda pair: pair[0].row)
        reads_source = self.encoder_decoder is not None and any(request.pending_source for request, _ in batch)
        embeds = any(request.embeddings is not None and request.cached < len(request.ids) for request, _ in batch)
        prepared = not (reads_source or embeds or self.observers or self.read_stream)
        model = self.plain if self.observers else self.model
        for observe in self.observers:
            observe(batch)
        one_each = all(length == request.pending == 1 for request, length in batch)
        if prepared and self.graphs is not None and (one_each or self.is_draft_batch(batch, self.graphs)):
            self.before_forward(batch, True)
            if (logits := self.replay(batch, self.graphs)) is not None:
                return logits
        elif prepared and self.compiled is not None and one_each:
            self.before_forward(batch, True)
            return self.decode(batch, self.compiled)
        self.before_forward(batch, False)
        tokens, layout, span = batch_inputs(batch, self.store, self.device)
        if any(request.unread for request, _ in batch):
            last = self.last[: len(batch)] if layout.rows is None else self.last[layout.rows]
            tokens = last.unsqueeze(-1).where(tokens == UNREAD, tokens)
        states = self.store.begin_forward(layout, span, check=False)  # the scheduler has reserved the space
        if self.encoder_decoder is not None and reads_source:
            # every row of the batch is encoded; a request past its first chunk gets the same keys a second time
            source, source_layout = pad_sources([request.source for request, _ in batch], next(self.model.parameters()))
            layout, states, _ = self.encoder_decoder.condition(source, source_layout, layout, states)
        embeddings = self.embed(batch, tokens) if embeds else None
        x, _ = model.residual_stream(tokens, layout, states, embeddings)  # (B, L, D)
        if self.read_stream is not None:
            self.read_stream(batch, x)
        hidden = model.final_norm(x)
        if any(request.sampling.prompt_logprobs is not None for request, _ in batch):
            record_prompt_logprobs(model, hidden, batch)
        ends = [(b, t) for b, (request, length) in enumerate(batch) for t in range(request.pending - 1, length)]
        if tokens.shape[1] > 1 or len(ends) < len(batch):
            hidden = hidden[tuple(zip(*ends, strict=True))] if ends else hidden[:0, 0]  # (N, D)
        else:
            hidden = hidden[:, 0]  # (N, D)
        return model.logits(hidden)

    def is_draft_batch(self, batch: ScheduledBatch, graphs: DecodeGraphs) -> bool:
        """Whether every request has a few tokens after its prompt, such as a draft, for which there are graphs."""
        last_row, longest = batch[-1][0].row or 0, max(length for _, length in batch)
        after_prompt = all(request.cached >= len(request.ids) for request, _ in batch)
        return self.graphs_of_drafts and after_prompt and graphs.fits(last_row + 1, longest)

    @contextmanager
    def observed(self, observe: Callable[[ScheduledBatch], None]) -> Generator[None]:
        """Run forwards eagerly on the model itself, so that its hooks are called; observe(batch) before each of them.

        The rows of a batch are those of the tensors in the forward. Requests with an adapter are not observed.
        """
        self.observers.append(observe)
        try:
            yield
        finally:
            self.observers.remove(observe)

    def keep_last(self, requests: Sequence[Request], ids: Tensor) -> None:
        """Keep the new ids (N,) of these requests as inputs of the next step, which the host may start before."""
        rows = [request.row for request in requests]
        if rows == list(range(len(rows))):
            self.last[: len(rows)] = ids
        else:
            self.last[to_device(torch.tensor(rows), self.device)] = ids

    def embed(self, batch: ScheduledBatch, tokens: Tensor) -> Tensor:
        """(B, L, D) embeddings: those of the model, replaced by those submitted with the requests."""
        x = self.model.embed(tokens)
        for b, (request, length) in enumerate(batch):
            if request.embeddings is not None:
                submitted = request.embeddings[request.cached : request.cached + length]
                x[b, : len(submitted)] = submitted.to(x)
        return x

    def decode(self, batch: ScheduledBatch, step: Step) -> Tensor:
        """Decode by the compiled step: the first rows of the store, a power of two, so that shapes rarely change."""
        pending = [(request.row or 0, *request.pending_ids(1), request.cached) for request, _ in batch]
        rows, ids, cached = torch.tensor(pending, device=self.device).unbind(1)  # sorted by row
        size = decode_size(pending[-1][0] + 1, self.store.rows)
        tokens, positions, valid = torch.zeros(3, size, 1, dtype=torch.long, device=self.device)
        tokens[rows, 0], positions[rows, 0], valid[rows] = self.last[rows].where(ids == UNREAD, ids), cached, 1
        slots = max(request.cached for request, _ in batch) + 1
        return step(tokens, positions, valid.bool(), self.span(slots))[rows]

    def replay(self, batch: ScheduledBatch, graphs: DecodeGraphs) -> Tensor | None:
        """Decode by a CUDA graph; None, with a warning, if the step cannot be captured."""
        self.store.upload()
        longest = max(request.cached + length for request, length in batch)
        span = self.store.max_span if self.store.in_place else self.span(longest)
        rows = [request.row for request, _ in batch if request.row is not None]  # in order
        starts = [request.cached for request, _ in batch]
        tokens = [request.pending_ids(length) for request, length in batch]
        try:
            logits = graphs.run(rows, tokens, starts, span, self.last)  # (B, L, V)
        except CannotCapture as error:
            self.drop_graphs(error, drafts_only=any(len(ids) > 1 for ids in tokens))
            return None
        length, logits = logits.shape[1], logits.flatten(0, 1)
        ends = [b * length + t for b, (r, count) in enumerate(batch) for t in range(r.pending - 1, count)]
        first, last = (ends[0], ends[-1]) if ends else (0, -1)
        if last - first + 1 == len(ends):  # no copy
            return logits[first : last + 1]
        return logits[to_device(torch.tensor(ends), self.device)]

    @torch.inference_mode()
    def warm_up(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Capture the CUDA graphs of all sizes, or compile the steps of all spans, now instead of when they are needed.

        progress(done, all)
        """
        if self.graphs is None:
            return self.warm_up_spans(progress)
        span = self.store.max_span if self.store.in_place else self.span(1)
        for done, rows in enumerate(sizes := self.graphs.sizes[::-1]):
            progress(done, len(sizes))
            try:
                self.graphs.capture(rows, span)
            except CannotCapture as error:
                return self.drop_graphs(error)
        progress(len(sizes), len(sizes))

    def warm_up_spans(self, progress: Callable[[int, int], None]) -> None:
        """Run the compiled step once per span: torch compiles it again for a few of them."""
        if self.compiled is None:
            return
        spans = sorted({self.span(1 << bits) for bits in range(self.store.max_span.bit_length() + 1)})
        for done, span in enumerate(spans):
            progress(done, len(spans))
            if not self.try_compiled(self.compiled, span):
                self.compiled = None
                return
        progress(len(spans), len(spans))

    def drop_graphs(self, error: CannotCapture, drafts_only: bool = False) -> None:
        if drafts_only:
            warnings.warn(f"{error}; drafts are verified eagerly", stacklevel=5)
            self.graphs_of_drafts = False
        else:
            warnings.warn(f"{error}; decoding eagerly", stacklevel=5)
            self.graphs = None

    def span(self, slots: int) -> int:
        """How many slots of each row a step reads: a power of two, so that shapes rarely change."""
        return min(max(256, 1 << (slots - 1).bit_length()), self.store.max_span)

    def decode_step(self, tokens: Tensor, positions: Tensor, valid: Tensor, span: int) -> Tensor:
        """(B, L) tokens of rows of the store -> (B · L, V) logits"""
        layout = TokenLayout(positions, valid=valid)
        states = self.store.begin_forward(layout, span, check=False)
        return self.model.logits(self.model.hidden(tokens, layout, states).flatten(0, 1))


def reads_pages(store: Store) -> bool:
    """Whether attention reads all keys and values of this store in pages, as they are."""
    return isinstance(store, Paged) and store.in_place and not any(s.encoding.quantizes for s in store.per_token)


def batch_inputs(batch: ScheduledBatch, store: Store, device: torch.device) -> tuple[Tensor, TokenLayout, int]:
    """Tokens (B, L), their layout, and how many slots of each row are read.

    Padding repeats the first token of its row, so it adds no NaN and no larger position.
    """
    lengths = [length for _, length in batch]
    longest = max(lengths)
    slots = max(request.cached + length for request, length in batch)
    rows = [request.row for request, _ in batch]
    ids = [pad_row(request.pending_ids(n), longest) for request, n in batch]
    offsets = [pad_row(list(range(request.cached, request.cached + n)), longest) for request, n in batch]
    tokens, positions = to_device(torch.tensor([ids, offsets]), device).unbind()  # (B, L) each, in one copy
    valid = [[True] * n + [False] * (longest - n) for n in lengths] if min(lengths) < longest else None
    layout = TokenLayout(
        positions,
        valid=None if valid is None else to_device(torch.tensor(valid), device),
        rows=None if rows == list(range(len(rows))) else to_device(torch.tensor(rows), device),
    )
    return tokens, layout, eager_span(slots, store)


def eager_span(slots: int, store: Store) -> int:
    """How many slots of each row an eager forward reads: a multiple of SPAN, so that shapes rarely change."""
    return min(-(-slots // SPAN) * SPAN, store.max_span)


def pad_row(row: list[int], length: int) -> list[int]:
    return row + row[:1] * (length - len(row))
