"""The namespace of a request: two requests share a cached prefix only if theirs are equal.

Keys and values depend on the tokens and on the model. So a namespace holds the version of the model, which changes when
a module is replaced or a weight is written in place (training, loading, adapters), and the request's salt, which keeps
one user from finding out another's prompts by response times. A request shares nothing if its keys depend on more: a
source, submitted embeddings, or forward hooks, which may change what a module computes. Neither does one that needs all
logits of its prompt.
"""

from torch import nn

from regard.engine.request import Request


def namespace_of(request: Request, model: nn.Module) -> tuple[int, str] | None:
    """None: the request shares nothing."""
    if request.source or request.embeddings is not None or request.sampling.prompt_logprobs is not None:
        return None
    version = model_version(model)
    return None if version is None else (version, request.salt)


def model_version(model: nn.Module) -> int | None:
    """A number that differs if a module or a weight has changed; None if a module inside the model has a forward hook.

    Not seen: writes through `.data`, and to tensors that were made in inference mode.
    """
    modules, tensors = list(model._modules.values()), []  # faster than modules(): it runs for every request
    for module in modules:  # grows
        if module is not None:
            if module._forward_hooks or module._forward_pre_hooks:
                return None
            modules += module._modules.values()
            tensors += module._parameters.values()
            tensors += module._buffers.values()
    return hash(tuple((id(t), 0 if t.is_inference() else t._version) for t in tensors if t is not None))
