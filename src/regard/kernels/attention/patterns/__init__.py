"""Sparse patterns of attention: masks that see few keys, and say which, so that the others are never computed."""
