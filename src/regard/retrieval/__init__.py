"""Retrieval: documents in chunks, an index of their words and vectors, and the chunks that match a query."""
