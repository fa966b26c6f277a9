"""Speculative decoding: a drafter proposes tokens, and one forward of the model verifies all of them.

A new method is one file with a class that implements `Drafter` (speculation.py), and one line in
cli/speculation_options.py.
"""
