"""Conversion of weights between two libraries: `ops` convert single tensors, a `table` a whole model."""
