"""Normal draws equal to those of R (`set.seed`, `rnorm`): Mersenne Twister and inversion, the defaults of R.

Tests use them to reproduce results that were computed in R.
"""

import numpy as np
import torch
from torch import Tensor


class RGenerator:
    """The random numbers that R draws after `set.seed(seed)`."""

    def __init__(self, seed: int):
        state = []
        for _ in range(50 + 625):  # 50 rounds of a congruential generator scramble the seed, 625 more fill the state
            seed = (69069 * seed + 1) % 2**32
            state.append(seed)
        self.twister = np.random.MT19937()
        self.twister.state = {"bit_generator": "MT19937", "state": {"key": state[51:], "pos": 624}}

    def rnorm(self, *shape: int) -> Tensor:
        """Draws in the order of R, the last index fastest."""
        count = int(np.prod(shape))
        uniform = self.twister.random_raw(2 * count).astype(np.float64).reshape(count, 2) * 2.3283064365386963e-10
        combined = np.floor(2.0**27 * uniform[:, 0]) + uniform[:, 1]  # two draws: 32 bits are too few for the tails
        return torch.special.ndtri(torch.from_numpy(combined / 2.0**27)).reshape(shape)

    def matrix(self, rows: int, columns: int) -> Tensor:
        """`matrix(rnorm(rows * columns), rows, columns)`, which R fills column by column."""
        return self.rnorm(columns, rows).T
