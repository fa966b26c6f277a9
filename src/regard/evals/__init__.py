"""Evaluations: tasks with known answers."""
