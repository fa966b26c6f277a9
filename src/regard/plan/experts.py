"""Experts: weights that are kept against weights that a token uses.

    total = shared + X · expert          active = shared + k · expert

A token pays for k experts, memory for all X of them.
"""


def split_of(total: float, active: float, experts: int, chosen: int) -> tuple[float, float]:
    """(shared, one expert) of a model of which only the two sums are known."""
    if not 0 < chosen < experts:
        raise ValueError(f"chosen={chosen} of experts={experts} says nothing of their size; it must be fewer than all")
    expert = (total - active) / (experts - chosen)
    return total - experts * expert, expert


def against_dense(experts: int, chosen: int, share: float = 1.0) -> tuple[float, float]:
    """(weights, work) in units of one dense feed-forward; `share` is an expert's size beside it."""
    return experts * share, chosen * share
