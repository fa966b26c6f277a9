"""The tuned lens (Belrose et al. 2023): a learned affine map per layer before the head of the logit lens.

    logits_l = W_head norm(x_l + A_l x_l + b_l)            A_l, b_l minimize KL(model's logits ‖ logits_l)

Layers write in bases of their own, which the head does not read; the map translates them. The model is not changed.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from regard.compat import save_tensors
from regard.lens.hooks import record
from regard.lens.inputs import single_stream
from regard.lens.logit_lens import unembed


class TunedLens(nn.Module):
    """Maps for the input of the stack and for all blocks but the last, whose logits are the model's own.

    It does not own the model: its parameters are those of the maps.
    """

    def __init__(self, model: Any):
        super().__init__()
        self.names = single_stream(model)[:-1]
        weight = next(model.parameters())
        width = model.spec.width
        self.maps = nn.ModuleList(nn.Linear(width, width, device=weight.device, dtype=weight.dtype) for _ in self.names)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)  # it starts as the logit lens
        self.model = (model,)  # in a tuple, so that the model is no submodule

    def logits(self, ids: Tensor) -> dict[str, Tensor]:
        """Logits (B, L, V) for ids (B, L), by name; the last are the model's own."""
        (model,) = self.model
        last = single_stream(model)[-1]
        with torch.no_grad(), record(model, [*self.names, last]) as recorded:
            model(ids)
        found = {
            name: unembed(model, recorded[name] + translate(recorded[name]), ids)
            for name, translate in zip(self.names, self.maps, strict=True)
        }
        return found | {last: unembed(model, recorded[last], ids)}

    def fit(
        self,
        batches: Iterable[Tensor],
        lr: float = 1e-3,
        progress: Callable[[int, float], None] = lambda step, loss: None,
    ) -> list[float]:
        """One step of Adam per batch of ids (B, L); returns the mean KL divergence over the layers, in nats, per step.

        progress(step, loss)
        """
        optimizer, losses = torch.optim.Adam(self.parameters(), lr), []
        for step, ids in enumerate(batches):
            with torch.enable_grad():
                *found, own = self.logits(ids).values()
                target = F.log_softmax(own.detach().float(), -1)
                divergences = [divergence(target, logits) for logits in found]
                loss = torch.stack(divergences).mean()
            optimizer.zero_grad()
            loss.backward(inputs=list(self.parameters()))
            optimizer.step()
            losses.append(loss.item())
            progress(step, losses[-1])
        return losses

    def save(self, path: str | Path) -> None:
        save_tensors(self.state_dict(), Path(path))

    @classmethod
    def load(cls, path: str | Path, model: nn.Module) -> "TunedLens":
        """The lens of a file, for the model that it was fitted for."""
        lens = cls(model)
        try:
            lens.load_state_dict(load_file(path))
        except RuntimeError as error:
            raise ValueError(f"{path} is no tuned lens of this model, which has {len(lens.names)} maps") from error
        return lens


def divergence(target: Tensor, logits: Tensor) -> Tensor:
    """KL(target ‖ logits), the mean over all tokens; target: log-probabilities (B, L, V)."""
    found = F.log_softmax(logits.float(), -1)
    return F.kl_div(found.flatten(0, -2), target.flatten(0, -2), reduction="batchmean", log_target=True)
