"""The parts of a model, one idea a file: its Spec, and beside it the Module that the spec builds."""
