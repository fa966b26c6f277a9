"""The calculator: what a spec costs before anything is built, and closed forms for what needs no spec."""

from regard.plan.cost import Plan, plan
from regard.plan.groups import groups, rows

__all__ = ["Plan", "groups", "plan", "rows"]
