"""Position schemes. Each is a part with four methods; a method that the scheme does not need is the identity.

embed(x, layout)       before the first block: add position embeddings to the token embeddings
share_bias(layout)     before the first block: set a bias for the scores of every attention of the stack
rotate(q, k, layout)   in attention: rotate queries and keys
bias(layout)           in attention: the bias that is added to the scores
"""
