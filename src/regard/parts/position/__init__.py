"""Where a token stands: every scheme is a part with four methods, each an identity unless the scheme needs it.

embed(x, at)       at the foot of the stack: add something to the embeddings
share(at)          at the foot of the stack: a bias for the scores of all its attention
rotate(q, k, at)   in attention: turn queries and keys
bias(at)           in attention: add something to the scores
"""
