"""Recorded activations by name: in memory, or one safetensors file per name in a folder, read on access.

with record(model, "stack.blocks.*", folder="activations") as recorded:
    model(ids)
recorded["stack.blocks.3"]                          # memory-mapped from activations/stack.blocks.3.safetensors
StoredActivations("activations")["stack.blocks.3"]  # the same in another process
"""

from collections import UserDict
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from regard.compat import save_tensors

SUFFIX = ".safetensors"


class Recorded(UserDict[str, Tensor]):
    """Outputs by module name, in the order of their latest call."""

    def __missing__(self, name: str) -> Tensor:
        raise KeyError(f"{name} was not recorded; recorded: {', '.join(self) or 'nothing'}")

    def keep(self, name: str, output: Tensor) -> None:
        self.data.pop(name, None)
        self.data[name] = output


class StoredActivations(Recorded):
    """Activations in the files of a folder; those that the folder has already can be read too.

    A tensor is read when it is accessed, and not kept. `keep` replaces a file by a whole new one.
    """

    def __init__(self, folder: str | Path):
        super().__init__()
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(self.folder.glob(f"*{SUFFIX}")):
            self.data[file.name.removesuffix(SUFFIX)] = EMPTY

    def keep(self, name: str, output: Tensor) -> None:
        save_tensors({"x": output.detach().cpu().contiguous()}, self.folder / f"{name}{SUFFIX}")
        self.data.pop(name, None)
        self.data[name] = EMPTY

    def __getitem__(self, key: str) -> Tensor:
        if key not in self:
            return self.__missing__(key)
        with safe_open(self.folder / f"{key}{SUFFIX}", "pt") as file:  # maps the file, and reads what is used
            return file.get_tensor("x")


EMPTY = Tensor()  # the value of a name whose tensor is in a file
