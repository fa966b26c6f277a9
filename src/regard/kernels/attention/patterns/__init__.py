"""Sparse attention patterns: masks with few keys per query, and block layouts that contain these keys."""
