"""Sparse autoencoders: an activation as a sum of few directions out of many.

    f = act(W_e (x - b) + c)        x̂ = f W_d + b        rows of W_d have length 1

    l1:    act = relu, loss = ‖x - x̂‖² + λ Σ f           Bricken et al. 2023
    topk:  act keeps the k largest, loss = ‖x - x̂‖²      Gao et al. 2024

Directions are often easier to interpret than neurons. `sae.directions[i]` can be given to `steer`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from regard.compat import save_tensors


class Quality(NamedTuple):
    explained: float  # share of the variance of the activations
    active: float  # features per activation
    dead: float  # share of the features that are active nowhere


class SparseAutoencoder(nn.Module):
    def __init__(
        self,
        width: int,
        features: int,
        kind: Literal["topk", "l1"] = "topk",
        k: int = 16,
        l1: float = 0.1,
        seed: int = 0,
    ):
        """k: active features of topk; l1: λ. Activations are divided by their mean length / √width (`scale`)."""
        super().__init__()
        if kind not in ("topk", "l1") or not 1 <= k <= features:
            raise ValueError(f"kind={kind!r} must be 'topk' or 'l1', and k={k} from 1 to {features}")
        self.kind, self.k, self.l1 = kind, k, l1
        directions = F.normalize(torch.randn(features, width, generator=torch.Generator().manual_seed(seed)), dim=1)
        self.directions = nn.Parameter(directions)  # W_d
        self.encoder = nn.Parameter(directions.clone())  # W_e
        self.threshold = nn.Parameter(torch.zeros(features))  # c
        self.center = nn.Parameter(torch.zeros(width))  # b
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(()))

    def encode(self, x: Tensor) -> Tensor:
        """(…, D) -> (…, features)"""
        f = F.linear(x.to(self.center) / self.scale - self.center, self.encoder, self.threshold).relu()
        if self.kind == "l1":
            return f
        top = f.topk(self.k, -1)
        return torch.zeros_like(f).scatter(-1, top.indices, top.values)

    def decode(self, features: Tensor) -> Tensor:
        """(…, features) -> (…, D)"""
        return (features @ self.directions + self.center) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        """The reconstruction, in the dtype of x, so that it can be given to `patch`."""
        return self.decode(self.encode(x)).to(x.dtype)

    def fit(
        self,
        x: Tensor,
        steps: int = 1000,
        batch: int = 1024,
        lr: float = 1e-3,
        seed: int = 0,
        progress: Callable[[int, float], None] = lambda step, loss: None,
    ) -> list[float]:
        """Train on activations x (N, D) with Adam; returns the loss of each step. progress(step, loss)

        Features that were not active in a tenth of the steps start anew, from the activations with the largest error.
        """
        if x.dim() != 2 or x.shape[1] != len(self.center):
            raise ValueError(f"the activations have shape {tuple(x.shape)}; they must be (N, {len(self.center)})")
        x = x.detach().to(self.center)
        with torch.no_grad():
            self.scale.copy_(x.norm(dim=1).mean() / x.shape[1] ** 0.5)
            self.center.copy_(x.mean(0) / self.scale)
        generator, optimizer, losses = torch.Generator().manual_seed(seed), torch.optim.Adam(self.parameters(), lr), []
        active = torch.zeros(len(self.directions), dtype=torch.bool, device=x.device)
        for step in range(steps):
            rows = x[torch.randint(len(x), (min(batch, len(x)),), generator=generator).to(x.device)]
            with torch.enable_grad():
                features = self.encode(rows)
                error = (self.decode(features) - rows) / self.scale
                loss = error.square().sum(-1).mean()
                if self.kind == "l1":
                    loss = loss + self.l1 * features.sum(-1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                self.directions.copy_(F.normalize(self.directions, dim=1))
                active |= (features > 0).any(0)
                if (step + 1) % max(1, steps // 10) == 0 and step < 0.8 * steps:
                    self.restart(~active, rows / self.scale, error)
                    active.zero_()
            losses.append(loss.item())
            progress(step, losses[-1])
        return losses

    def restart(self, dead: Tensor, rows: Tensor, error: Tensor) -> None:
        """Point dead features at what is missing in the rows with the largest error."""
        indices = dead.nonzero().flatten()[: len(rows)]
        worst = error.square().sum(-1).topk(len(indices)).indices
        found = F.normalize(-error[worst], dim=1)
        self.directions[indices], self.encoder[indices], self.threshold[indices] = found, found, 0.0

    @torch.no_grad()
    def quality(self, x: Tensor) -> Quality:
        features = self.encode(x)
        x = x.to(self.center)
        residual = (x - self.decode(features)).square().sum() / (x - x.mean(0)).square().sum()
        on = features > 0
        dead = 1 - on.flatten(0, -2).any(0).double().mean().item()
        return Quality(1 - residual.item(), on.sum(-1).double().mean().item(), dead)

    def save(self, path: str | Path) -> None:
        options = {"kind": self.kind, "k": str(self.k), "l1": str(self.l1)}
        save_tensors(self.state_dict(), Path(path), options)

    @classmethod
    def load(cls, path: str | Path) -> "SparseAutoencoder":
        with safe_open(path, "pt") as file:
            options, tensors = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if "directions" not in tensors or options.get("kind") not in ("topk", "l1"):
            raise ValueError(f"{path} is no sparse autoencoder; give a file that SparseAutoencoder.save wrote")
        features, width = tensors["directions"].shape
        kind: Literal["topk", "l1"] = "topk" if options["kind"] == "topk" else "l1"
        sae = cls(width, features, kind, int(options["k"]), float(options["l1"])).to(tensors["directions"].dtype)
        sae.load_state_dict(tensors)
        return sae
