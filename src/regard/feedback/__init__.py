"""Feedback without people: comparing two models, a model as judge, and training data from critiques and verdicts."""
