"""Conversion of weights between two libraries: `ops` convert single tensors, a `table` maps those of a whole model."""
