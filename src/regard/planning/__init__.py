"""The costs of a model before it is built: parameters, FLOPs, cache, memory of training, speed on a device.

`plan(spec)` computes them for any spec. The parts declare their own costs (parts/body.py), so `plan` also works for
parts from outside the package. Closed forms that need no spec are in flops.py, memory.py, training.py, speed.py and
scaling.py.
"""

from regard.planning.groups import groups, rows
from regard.planning.model_plan import Plan, plan

__all__ = ["Plan", "groups", "plan", "rows"]
