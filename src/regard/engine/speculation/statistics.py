"""What speculation has gained: acceptance by position of the draft, tokens per forward, and the measured speed-up.

The expected numbers, from the acceptance of a token and the cost of drafts, are those of planning/speed.py.
"""


class SpeculationStatistics:
    def __init__(self, draft_tokens: int):
        self.proposed, self.accepted = [0] * draft_tokens, [0] * draft_tokens  # by position in the draft
        self.drafts = 0  # that were verified
        self.draft_seconds = self.verify_seconds = self.plain_seconds = 0.0
        self.verified_tokens = self.plain_tokens = 0  # new tokens of steps with drafts, and of steps without

    def count_draft(self, length: int, accepted: int) -> None:
        self.drafts += 1
        for i in range(length):
            self.proposed[i] += 1
            self.accepted[i] += i < accepted

    def count_step(self, plain: bool, tokens: int, draft_seconds: float, seconds: float) -> None:
        """A step of the engine that gave so many tokens. plain: no request had a draft."""
        self.draft_seconds += draft_seconds
        if plain:
            self.plain_seconds, self.plain_tokens = self.plain_seconds + seconds, self.plain_tokens + tokens
        else:
            self.verify_seconds, self.verified_tokens = self.verify_seconds + seconds, self.verified_tokens + tokens

    @property
    def acceptance(self) -> list[float]:
        """The share of accepted tokens, by position in the draft; only positions that were proposed."""
        return [a / p for a, p in zip(self.accepted, self.proposed, strict=True) if p]

    @property
    def tokens_per_draft(self) -> float:
        """New tokens of a request per forward with a draft: the accepted ones, and the model's own."""
        return 1 + sum(self.accepted) / self.drafts if self.drafts else 1.0

    @property
    def speedup(self) -> float | None:
        """Tokens per second of all decode steps, drafting included, relative to the steps that had no draft.

        None if there was no such step. It is an estimate: those steps may have had more or fewer requests.
        """
        if not (self.plain_tokens and self.verified_tokens):
            return None
        seconds = self.draft_seconds + self.verify_seconds + self.plain_seconds
        return (self.verified_tokens + self.plain_tokens) / seconds * self.plain_seconds / self.plain_tokens

    def metrics(self) -> dict[str, float]:
        numbers: dict[str, float] = {
            "drafts": self.drafts, "draft_tokens": sum(self.proposed), "accepted_draft_tokens": sum(self.accepted),
            "draft_seconds": self.draft_seconds, "verify_seconds": self.verify_seconds,
            "tokens_per_draft": self.tokens_per_draft,
        }  # fmt: skip
        numbers |= {f"draft_acceptance_{i}": share for i, share in enumerate(self.acceptance, 1)}
        return numbers if self.speedup is None else numbers | {"speculation_speedup": self.speedup}
