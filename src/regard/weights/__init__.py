"""Conversion of weights between two libraries: `ops` are the steps of one tensor, a `table` maps the whole model."""
