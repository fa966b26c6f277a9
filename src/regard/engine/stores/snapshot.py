"""Snapshots: what a row carried when it had read so many tokens. Another text can go on from there, in it or elsewhere.

    snapshot = store.snapshot(row)                 after n tokens
    store.rewind(row, n, snapshot)                 as if the row had read only those: speculation
    store.fork(row, to, snapshot)                  another row has read them too: a common prefix

What is kept token by token goes back by itself and is not copied. A recurrence has added its tokens up, and a ring has
written over old ones: these are copied, and their size does not depend on the length of the text.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(eq=False)
class Snapshot:
    row: int
    length: int
    held: list[list[Tensor]]  # of every state that cannot go back by itself
    stale: bool = False  # the row has gone back further since, so its tokens may be others


class CannotRewind(ValueError):
    """A state that no longer has what it was asked to go back to."""
