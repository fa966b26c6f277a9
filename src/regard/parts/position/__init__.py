"""Where a token stands: every scheme is a part with three methods, each an identity unless the scheme needs it.

embed(x, at)       at the foot of the stack: add something to the embeddings
rotate(q, k, at)   in attention: turn queries and keys
bias(at)           in attention: add something to the scores
"""
