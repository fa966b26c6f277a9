"""Sparse attention patterns: masks with few keys per query and the block layouts that find them."""
