"""The calculator: what a spec costs before anything is built."""

from regard.plan.cost import DTYPES, Plan, plan

__all__ = ["DTYPES", "Plan", "plan"]
