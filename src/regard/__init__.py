"""regard: one set of parts from which every transformer is built, trained, adapted, served and inspected.

    llm = regard.load("smollm2")                    a model with its tokenizer: generate, chat, stream, embed
    spec = regard.Decoder(...); spec.build(seed=0)  a new model from parts
    regard.plan(spec), regard.verify(spec)          its cost, and whether its features work together

Every public name is imported on first use, so that `import regard` takes milliseconds and does not import torch.
"""

from importlib import import_module

from regard.kinds import TABLES

__version__ = "0.1.0"

# Every spec class is public under its own name: Decoder, Block, Attention, Rope, Window, AdamW, LoRA ...
_SPECS = [path.partition(":") for table in TABLES.values() for path in table.values()]
_MODULE_OF = {name: module for module, _, name in _SPECS} | {
    # load, use and write models
    "load": "regard.load_model",
    "LanguageModel": "regard.language_model",
    "save": "regard.checkpoint",
    "export": "regard.checkpoint",
    "Tokenizer": "regard.text.tokenizer",
    # write specs
    "tile": "regard.models.pattern",
    "register": "regard.spec",
    "Spec": "regard.spec",
    "SpecError": "regard.spec",
    "Body": "regard.parts.body",
    "Position": "regard.parts.position.base",
    "Mask": "regard.kernels.attention.mask",
    "PerToken": "regard.parts.state",
    "FixedSize": "regard.parts.state",
    "State": "regard.parts.state",
    "STATELESS": "regard.parts.state",
    # run a model yourself
    "TokenLayout": "regard.layout",
    "Source": "regard.layout",
    "use_backend": "regard.parts.attention",
    "Contiguous": "regard.engine.stores.contiguous",
    "Paged": "regard.engine.stores.paged",
    # train and adapt
    "train": "regard.training_run",
    "Trainer": "regard.training.loop",
    "next_token": "regard.objectives.next_token",
    "Batch": "regard.data.batch",
    "add_lora": "regard.adapt",
    "merge_lora": "regard.adapt",
    "unmerge_lora": "regard.adapt",
    "adapter_names": "regard.adapt",
    "set_adapter": "regard.adapt",
    "disable_adapters": "regard.adapt",
    "save_adapter": "regard.adapt",
    "load_adapter": "regard.adapt",
    # generate
    "Engine": "regard.engine.engine",
    "Sampling": "regard.engine.request",
    # plan and verify
    "plan": "regard.planning",
    "Plan": "regard.planning",
    "verify": "regard.verification.report",
    "Report": "regard.verification.report",
    # inspect a model
    "record": "regard.lens",
    "patch": "regard.lens",
    "attention_maps": "regard.lens",
}

__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> object:
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    if name.startswith("__"):
        raise AttributeError(name)
    from regard.spec import suggest_name

    raise AttributeError(f"module 'regard' has no attribute {name!r}; {suggest_name(name, _MODULE_OF)}")


def __dir__() -> list[str]:
    return sorted(__all__)
