"""Pure functions on tensors: each operation as a plain reference and as faster backends that compute the same."""
