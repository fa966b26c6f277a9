"""The highest score of every query and where it stands, over tiles of scores.

PyTorch's argmax reads one number at a time. So of every tile only the peaks of a few pieces are taken, of a row whose
highest score has risen the piece with the new one is kept, and the place inside it is looked for once, in the end. The
rows that rise are fewer in every tile.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


class RunningArgmax:
    """Of equal scores the first counts."""

    def __init__(self, q: Tensor, width: int) -> None:
        self.score = q.new_full((*q.shape[:-1], 1), torch.finfo(q.dtype).min / 2)  # (B, H, l, 1): lower than any seen
        self.start = torch.full((self.score.numel(),), -1, device=q.device)
        self.piece = q.new_zeros(len(self.start), width)

    def look(self, s: Tensor, start: int) -> Tensor:
        """The highest of every row of a tile (B, H, l, s), whose first key is `start`."""
        width = self.piece.shape[-1]
        if short := -s.shape[-1] % width:
            s = F.pad(s, (0, short), value=torch.finfo(s.dtype).min)
        pieces = s.unflatten(-1, (-1, width))  # (B, H, l, pieces, width)
        peaks = pieces.amax(-1)
        peak = peaks.amax(-1, keepdim=True)
        risen = (peak > self.score).flatten().nonzero().squeeze(-1)
        which = peaks.flatten(0, -2).index_select(0, risen).max(-1).indices
        self.piece.index_copy_(0, risen, pieces.flatten(0, -2).index_select(0, risen * peaks.shape[-1] + which))
        self.start.index_copy_(0, risen, which * width + start)
        self.score = torch.maximum(self.score, peak)
        return peak

    def key(self) -> Tensor:
        """(B, H, l, 1); -1 where no key was seen."""
        return torch.where(self.start < 0, -1, self.start + self.piece.max(-1).indices).view(self.score.shape)
