"""Agents: tools, and the loop in which a model calls them, reads their results and goes on."""
