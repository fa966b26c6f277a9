"""What a model costs before it is built: parameters, FLOPs, cache, memory of training, speed on a device.

`plan(spec)` returns the numbers of any spec. The parts declare their own costs (parts/body.py), so a part that is
written outside the package is planned as well. Closed forms that need no spec are in flops.py, memory.py, training.py,
speed.py and scaling.py.
"""

from regard.planning.cost import Plan, plan
from regard.planning.groups import groups, rows

__all__ = ["Plan", "groups", "plan", "rows"]
