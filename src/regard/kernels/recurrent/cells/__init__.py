"""Recurrences of one step after another: h_t = f(x_t, h_{t-1}), the ancestors of all that remember.

`rnn`, `lstm` and `gru` have the equations as a step, and the same through torch's fused operation. `loop` applies a
step token by token; it honours documents and padding, and is the oracle. `documents` hands documents of all lengths
to the fused operation at once, each a sequence of its own, so that a packed row takes only as many steps as its longest
document.
"""
