"""The rules by which Whisper decodes a window, as a logits processor (Radford et al. 2022, section 4.5).

1. The first tokens are given: language, task, <|notimestamps|>. Of several languages the most likely one is taken.
2. Some tokens are never generated, some not as the first. Without timestamps, no timestamp token is generated.
3. With timestamps: the first token is one, and not a late one. They come in pairs, the end of a segment and the start
   of the next, and never decrease. If all together are more likely than any token of text, one of them is generated.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.speech.whisper_tokens import WhisperTokens


class DecodingRules:
    def __init__(self, tokens: WhisperTokens, start: int, given: Sequence[Sequence[int]], timestamps: bool):
        """start: the number of tokens until <|startoftranscript|>. given: the possible ids of each token after it."""
        self.tokens, self.start, self.given, self.timestamps = tokens, start, given, timestamps
        self.no_speech: Tensor | None = None  # the probability of <|nospeech|> after <|startoftranscript|>
        # By the number of new tokens: log-probability among the tokens that the rules allow, minus that among all.
        self.shifts: dict[int, Tensor] = {}

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """(T,) ids and (V,) logits, which may be changed -> (V,)"""
        step, total = len(ids) - self.start, logits.logsumexp(-1)
        if step == 0:
            self.no_speech = (logits[self.tokens.no_speech] - total).exp()
        if step < len(self.given):
            return keep_most_likely(logits, self.given[step])
        new = ids[self.start + len(self.given) :].tolist()
        logits[list(self.tokens.suppress)] = -torch.inf
        if not new:
            logits[list(self.tokens.begin_suppress)] = -torch.inf
        if self.timestamps:
            self.apply_timestamp_rules(new, logits)
        else:
            logits[self.tokens.timestamp_begin :] = -torch.inf
        self.shifts[step] = total - logits.logsumexp(-1)
        return logits

    def apply_timestamp_rules(self, new: list[int], logits: Tensor) -> None:
        """Change the logits after the new tokens of a text with timestamps."""
        begin = self.tokens.timestamp_begin
        logits[self.tokens.no_timestamps] = -torch.inf
        previous = [id for id in new if id >= begin]
        after_timestamp = bool(new) and new[-1] >= begin
        after_pair = after_timestamp and (len(new) < 2 or new[-2] >= begin)  # the first timestamp is a start too
        if after_pair:
            logits[begin:] = -torch.inf
        elif after_timestamp:
            logits[: self.tokens.end] = -torch.inf  # a timestamp, or the end
        if previous:  # a segment may start where the one before ends, but has a length
            logits[begin : previous[-1] + (0 if after_timestamp and not after_pair else 1)] = -torch.inf
        if not new:
            logits[:begin] = -torch.inf
            if self.tokens.max_initial_timestamp is not None:
                logits[begin + self.tokens.max_initial_timestamp + 1 :] = -torch.inf
        likely = logits[begin:].logsumexp(-1) > logits[:begin].amax()
        logits[:begin] = logits[:begin].masked_fill(likely, -torch.inf)

    def mean_logprob(self, logprobs: Sequence[float]) -> float:
        """Of the tokens of the text, by the log-probabilities of all new tokens."""
        steps = [step for step in range(len(logprobs)) if step in self.shifts]
        if not steps:
            return 0.0
        shifts = torch.stack([self.shifts[step] for step in steps]).tolist()  # one copy from the device
        return sum(logprobs[step] + shift for step, shift in zip(steps, shifts, strict=True)) / len(steps)


def keep_most_likely(logits: Tensor, ids: Sequence[int]) -> Tensor:
    """The logits without all tokens except the most likely of `ids`."""
    index = torch.tensor(ids, device=logits.device)
    best = index[logits[index].argmax()]
    return torch.full_like(logits, -torch.inf).index_copy(0, best.unsqueeze(0), logits[best].unsqueeze(0))
