"""Whole models, each a short composition of parts."""
