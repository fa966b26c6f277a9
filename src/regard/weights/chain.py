"""Two weight tables in a row: a file's names -> a family's names -> ours.

A format that renames what a family already has a table for (GGUF) needs the renaming only. The steps of the first table
are one to one, and a tensor takes them when the second asks for it, so nothing is held in between.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor

from regard.weights.table import Link, StoredTensor, Table, check


class Chain:
    def __init__(self, outer: Table, inner: Table):
        self.outer, self.inner = outer, inner

    def read(self, found: Mapping[str, StoredTensor], ours: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        return self.inner.read(renamed(self.outer, found, dict(self.inner.write(ours))), ours)

    def write(self, ours: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        return self.outer.write(dict(self.inner.write(ours)))


def renamed(table: Table, found: Mapping[str, StoredTensor], like: Mapping[str, Tensor]) -> dict[str, StoredTensor]:
    """The same tensors under the names of `like`, unread; names and shapes are checked now, in the file's own terms."""
    links = {name: (link, values, link.shapes([like[name]])) for link, values, (name,) in table.walk(like)}
    theirs = {name: link.names(values, chain[0])[0] for name, (link, values, chain) in links.items()}
    check(found, {theirs[name]: tuple(chain[0][0].shape) for name, (_, _, chain) in links.items()}, table.ignored)
    return {
        name: replace(found[theirs[name]], shape=tuple(like[name].shape), read=partial(step, link, found[theirs[name]]))
        for name, (link, _, _) in links.items()
    }


def step(link: Link, tensor: StoredTensor) -> Tensor:
    (read,) = link.read([tensor.read()], [[]] * (len(link.ops) + 1))  # one to one: no step asks what it must give
    return read
