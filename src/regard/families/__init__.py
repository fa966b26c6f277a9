"""Other libraries' models: each family is a function from its config to our spec, the way back, and a weight table.

    spec(config) -> Model        config(model) -> dict        table(model) -> Table

A family has no class and no forward of its own. What our parts cannot say is refused by name on the way in, what the
foreign class cannot say on the way out.
"""

from importlib import import_module
from types import ModuleType

from regard.families.foreign import FamilyError
from regard.spec import nearest

FAMILIES = {
    "gpt2": "regard.families.gpt2",
    "llama": "regard.families.llama",
}


def family(model_type: object) -> ModuleType:
    """The module of a family by the `model_type` of its config.json."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise FamilyError(f"there is no family {model_type!r}; {nearest(str(model_type), FAMILIES)}")
    return import_module(FAMILIES[model_type])
