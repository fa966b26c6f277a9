"""Stores so small that they run out of blocks."""

from functools import partial

from regard.engine.stores import STORES
from regard.engine.stores.base import OpenStore
from regard.engine.stores.paged import Paged


def small_store(name: str, blocks: int) -> OpenStore:
    """The store of this name; a paged store has this many blocks of four tokens."""
    return partial(Paged, block=4, blocks=blocks) if name == "paged" else STORES[name]
