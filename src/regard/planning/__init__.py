"""The costs of a model before it is built: parameters, FLOPs, cache, memory of training, speed on a device.

`plan(spec)` computes them for any spec. The parts declare their own costs (parts/body.py), so `plan` also works for
parts from outside the package. Closed forms that need no spec are in flops.py, memory.py, training.py, speed.py and
scaling.py.
"""

from regard.planning.cost import Plan, plan
from regard.planning.groups import groups, rows

__all__ = ["Plan", "groups", "plan", "rows"]
