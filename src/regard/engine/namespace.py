"""The namespace of a request: two requests share a cached prefix only if theirs are equal.

Keys and values depend on the tokens and on the model. So a namespace holds the version of the model, which changes when
a module is replaced, a weight is written in place (training, loading, merged adapters) or another adapter of the model
is activated, the version of the request's adapter, and its salt, which keeps one user from finding out another's
prompts by response times. Tokens with submitted embeddings, such as the patches of an image, are equal only if these
are equal in every bit. A request shares nothing if its keys depend on more: a source, or forward hooks, which may
change what a module computes. Neither does one that needs all logits of its prompt.
"""

from collections.abc import Sequence
from hashlib import sha256

import torch
from torch import Tensor, nn

from regard.adapt.lora import LoRALayer
from regard.engine.request import PrefixKeys, Request
from regard.models.decoder import DecoderModule


def sharing_key(request: Request) -> tuple[int, str] | None:
    """What the namespace holds of the request itself; None: it shares nothing."""
    if request.source_length or request.sampling.prompt_logprobs is not None:
        return None
    adapter = 0 if request.adapter is None else request.adapter.version  # also of a reloaded adapter a new one
    return adapter, request.salt


def namespace_of(request: Request, version: int | None) -> tuple[int, int, str] | None:
    """version: of the model. None: the request shares nothing."""
    key = sharing_key(request)
    return None if key is None or version is None else (version, *key)


def model_version(model: nn.Module) -> int | None:
    """A number that differs if a module or a weight has changed; None if a module inside the model has a forward hook.

    Not seen: writes through `.data`, and to tensors that were made in inference mode.
    """
    modules, tensors, active = list(model._modules.values()), [], []  # faster than modules()
    for module in modules:  # grows
        if module is not None:
            if module._forward_hooks or module._forward_pre_hooks:
                return None
            modules += module._modules.values()
            tensors += module._parameters.values()
            tensors += module._buffers.values()
            if isinstance(module, LoRALayer):
                active.append(module.active)
    versions = [(id(t), 0 if t.is_inference() else t._version) for t in tensors if t is not None]
    return hash((*active, *versions))


@torch.inference_mode()
def embedding_keys(model: DecoderModule, ids: Sequence[int], embeddings: Tensor) -> PrefixKeys:
    """What identifies each token of a prompt: its id, or a digest of its embedding if that is not the model's own."""
    own = model.embed(torch.tensor([ids], device=next(model.parameters()).device))[0]  # (L, D)
    rows = embeddings.to(own).contiguous().view(torch.uint8)  # bytes: 0.0 and -0.0 differ
    replaced = (rows != own.contiguous().view(torch.uint8)).any(-1).tolist()
    values = rows.cpu().numpy()
    return tuple(
        sha256(id.to_bytes(8, "little") + row.tobytes()).digest() if other else id
        for id, row, other in zip(ids, values, replaced, strict=True)
    )
