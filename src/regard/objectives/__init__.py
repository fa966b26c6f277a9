"""Training objectives: each is a function `(model, batch) -> (loss_sum, count, metrics)`; base.py has the interface."""
