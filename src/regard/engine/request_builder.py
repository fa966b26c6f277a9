"""Builds the requests of an engine: every argument is checked before a request is submitted."""

from collections.abc import Sequence

from torch import Tensor

from regard.engine.adapters import Adapters
from regard.engine.inputs import (
    SourceInput,
    check_order,
    check_sampled_ids,
    checked_prompt,
    checked_source,
    deadline_of,
)
from regard.engine.namespace import embedding_keys
from regard.engine.request import PromptEmbeddings, Request, Sampling, TokenHistory
from regard.models.decoder import DecoderModule
from regard.models.encoder_decoder import EncoderDecoderModule


class RequestBuilder:
    def __init__(
        self,
        model: DecoderModule,
        encoder_decoder: EncoderDecoderModule | None,
        capacity: int,
        source_capacity: int,
        adapters: Adapters,
    ):
        self.model, self.encoder_decoder, self.adapters = model, encoder_decoder, adapters
        self.capacity, self.source_capacity = capacity, source_capacity

    def build(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        source: SourceInput | None = None,
        embeddings: Tensor | PromptEmbeddings | None = None,
        *,
        salt: str = "",
        priority: int = 0,
        tenant: str = "",
        deadline: float | None = None,
        adapter: str | None = None,
    ) -> Request:
        """A request that is not submitted. ValueError if it can never run. Arguments as for `Engine.submit`."""
        vocab = self.model.spec.vocab
        if isinstance(embeddings, Tensor):
            embeddings = self.embeddings(ids, embeddings)
        values, keys = embeddings if isinstance(embeddings, PromptEmbeddings) else (embeddings, ())
        ids = checked_prompt(ids, self.model.spec, self.capacity, values)
        check_sampled_ids(sampling, vocab)
        check_order(priority, tenant, salt)
        request = Request(
            ids, sampling, checked_source(self.encoder_decoder, source, self.source_capacity), values, keys, salt,
            priority, tenant, deadline_of(deadline), None if adapter is None else self.adapters.find(adapter),
        )  # fmt: skip
        request.limit = min(sampling.max_new, self.capacity - len(ids))
        if sampling.penalizes:
            request.history = TokenHistory(ids, vocab, next(self.model.parameters()).device)
        if sampling.grammar is not None:
            request.matcher = sampling.grammar.matcher(sampling.stop_ids)
        return request

    def embeddings(self, ids: Sequence[int], embeddings: Tensor) -> PromptEmbeddings:
        """Embeddings of a prompt on the host, and its keys. ValueError if their shape is not (len(ids), D)."""
        ids = checked_prompt(ids, self.model.spec, self.capacity, embeddings)
        return PromptEmbeddings(embeddings.detach().cpu(), embedding_keys(self.model, ids, embeddings))
