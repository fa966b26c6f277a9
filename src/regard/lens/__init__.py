"""Looking inside: record what any module gave, put something else in its place, see where attention goes.

Everything is an ordinary hook on the model that trains and serves; there is no second one.
"""

from regard.lens.attention_patterns import attention_heads, attention_maps, attention_weights, entropy, row_entropy
from regard.lens.patching import patch
from regard.lens.recording import record

__all__ = ["attention_heads", "attention_maps", "attention_weights", "entropy", "patch", "record", "row_entropy"]
