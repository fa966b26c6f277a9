"""The parts of a model, one idea per file: its Spec, and the Module that the spec builds."""
