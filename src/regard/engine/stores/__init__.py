"""Stores: how the states of a model's layers are kept between forwards.

A new store is one file with a class that follows `Store` (base.py), and one line in STORES.
"""

from regard.engine.stores.base import Store
from regard.engine.stores.contiguous import Contiguous
from regard.engine.stores.paged import Paged

STORES: dict[str, type[Store]] = {"paged": Paged, "contiguous": Contiguous}
