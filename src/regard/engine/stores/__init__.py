"""Stores: how the states of a model's layers are kept between forwards.

A new store is one file with a class that implements `Store` and `OpenStore` (base.py), and one line in STORES.
"""

from regard.engine.stores.base import OpenStore
from regard.engine.stores.contiguous import Contiguous
from regard.engine.stores.paged import Paged

STORES: dict[str, OpenStore] = {"paged": Paged, "contiguous": Contiguous}
