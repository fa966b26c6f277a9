"""Stores keep what mixers remember. The store decides how; a mixer only declares what (parts/state.py).

A token is kept under its position, so everything a causal query may see has been written. A row goes on where it is,
is taken back (snapshot.py), or is released and begins anew. What is given back is zeroed: attention multiplies even
what is masked, and 0 · NaN is NaN. `span` is how many positions a forward reads: set by the caller before each forward,
so shapes change rarely.
"""
