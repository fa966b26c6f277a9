"""What speculation gains: k tokens are drafted, one pass of the target judges them and adds one of its own.

    tokens a pass     E = Σ_{i=0..k} αⁱ = (1 - α^{k+1}) / (1 - α)          α: chance that a draft is accepted
    speed-up          E / (1 + k·c)                                        c: cost of a draft step, in target passes

Leviathan et al. 2023. It takes that judging k + 1 tokens costs what one does, which holds while decoding waits for
memory.
"""


def expected_tokens(acceptance: float, drafts: int) -> float:
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance={acceptance} is a chance; give a number from 0 to 1")
    if drafts < 0:
        raise ValueError(f"drafts={drafts} must not be negative")
    return sum(acceptance**i for i in range(drafts + 1))


def speedup(acceptance: float, drafts: int, cost: float) -> float:
    if cost < 0:
        raise ValueError(f"cost={cost} is what a draft step takes, in passes of the target; it cannot be negative")
    return expected_tokens(acceptance, drafts) / (1 + drafts * cost)


def best_drafts(acceptance: float, cost: float, most: int = 64) -> int:
    """How many tokens to draft at a time; 0 when speculation does not pay."""
    return max(range(most + 1), key=lambda drafts: speedup(acceptance, drafts, cost))


def speculation_plan(acceptance: float, cost: float) -> dict[str, dict[str, float]]:
    """A group for a plan: the best number of drafts and what it gives."""
    drafts = best_drafts(acceptance, cost)
    return {
        "speculation": {
            "acceptance": acceptance,
            "cost_of_a_draft_step": cost,
            "best_drafts": drafts,
            "tokens_a_pass": expected_tokens(acceptance, drafts),
            "speedup": speedup(acceptance, drafts, cost),
        }
    }
