"""Pure functions on tensors: each idea once as plain algebra, and beside it the fast ways to compute the same."""
