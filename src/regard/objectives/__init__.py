"""What a model is trained for: each objective is a function `(model, batch) -> (loss_sum, count, metrics)`."""
