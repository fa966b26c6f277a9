"""Sources of training examples, each a spec with one file: generated ones, files of the user, images.

A new source is a class with one line in SOURCES (kinds.py) and one line in tests/data/test_sources.py.
"""
