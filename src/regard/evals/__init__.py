"""Measuring what a model can do, by tasks whose answers are known."""
