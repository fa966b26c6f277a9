"""What a request has seen and said, as far as penalties count it."""

from collections.abc import Sequence

import torch


class History:
    """Which tokens the prompt holds and how often each was answered; only requests with penalties have one."""

    def __init__(self, ids: Sequence[int], vocab: int, device: torch.device):
        self.prompt = torch.zeros(vocab, dtype=torch.bool, device=device)
        self.prompt[list(ids)] = True
        self.counts = torch.zeros(vocab, dtype=torch.int64, device=device)

    def add(self, id: int) -> None:
        self.counts[id] += 1
