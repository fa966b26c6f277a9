"""Images with labels or texts: the handwritten digits of scikit-learn, and folders of image files.

    Digits        1,797 gray images of 8 x 8 pixels, ten classes; needs scikit-learn       Alpaydin & Kaynak 1998
    ImageFolder   FOLDER/LABEL/file.png, or FOLDER/metadata.jsonl; needs Pillow

An image is an array (channels, height, width) with values from 0 to 1, or standardized: minus 0.5, divided by 0.5.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from regard.data.readers import read_examples
from regard.data.sources.base import DataSource, Example, Examples, Splits, first_epoch, open_collection
from regard.image_file import open_image
from regard.spec import require

if TYPE_CHECKING:
    from torch import Tensor

METADATA = "metadata.jsonl"
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
MAX_DIGIT = 16.0  # the largest pixel value of the digits


@dataclass(frozen=True)
class Digits(DataSource):
    standardize: bool = True

    def open(self, seed: int = 0, hold_out: bool = True) -> Splits:
        package = find_spec("sklearn")
        if package is None or not package.submodule_search_locations:
            raise ValueError("the source digits needs scikit-learn: pip install 'regard[digits]'")
        # Its own load_digits reads the same file, but importing sklearn takes seconds.
        file = Path(package.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
        rows = np.loadtxt(file, delimiter=",")  # 64 pixels and the label
        images = scaled(rows[:, :-1].reshape(-1, 1, 8, 8) / MAX_DIGIT, self.standardize)
        examples = [{"image": image, "label": int(row[-1])} for image, row in zip(images, rows, strict=True)]
        return open_collection(f"digits, seed {seed}", examples, seed, hold_out)


@dataclass(frozen=True)
class ImageFolder(DataSource):
    """The label of an image is the name of its folder; or metadata.jsonl has one line per image, with its `file_name`
    and the other fields of the example, such as `text`, as in Hugging Face `datasets`."""

    path: str = ""
    size: tuple[int, int] = (32, 32)  # (height, width); images are resized to it
    gray: bool = False  # one channel instead of three
    standardize: bool = True

    def check(self) -> None:
        super().check()
        require(bool(self.path), "images: path is missing; set data.path")
        require(
            len(self.size) == 2 and min(self.size) > 0, f"images: size={self.size} must be a positive height and width"
        )

    def open(self, seed: int = 0, hold_out: bool = True) -> Splits:
        return open_collection(f"{self.path}, seed {seed}", self.read(), seed, hold_out)

    def read(self) -> list[Example]:
        root = Path(self.path)
        if (root / METADATA).is_file():
            return [self.read_described(root, example) for example in read_examples(root / METADATA)]
        files = sorted(file for file in root.glob("*/*") if file.suffix.lower() in SUFFIXES)
        if not files:
            raise ValueError(
                f"{root} has no {METADATA}, and no images in subfolders (LABEL/FILE with {', '.join(SUFFIXES)}); "
                "check data.path"
            )
        return [{"image": self.read_image(file), "label": file.parent.name} for file in files]

    def read_described(self, root: Path, example: Example) -> Example:
        """The example of a line of metadata.jsonl."""
        name = example.get("file_name")
        if not isinstance(name, str) or not (root / name).resolve().is_relative_to(root.resolve()):
            raise ValueError(f"{root / METADATA}: `file_name` must be the name of an image in {root}, found {name!r}")
        fields = {key: value for key, value in example.items() if key != "file_name"}
        return {"image": self.read_image(root / name), **fields}

    def read_image(self, file: Path) -> np.ndarray:
        image = open_image(file, self.gray).resize(self.size[::-1])  # bicubic
        values = np.asarray(image, np.float64) / 255
        return scaled(values[None] if self.gray else values.transpose(2, 0, 1), self.standardize)


class LabelledImages(NamedTuple):
    images: "Tensor"  # (N, C, H, W)
    labels: "Tensor"  # (N,)


def labelled_images(split: Examples, limit: int) -> LabelledImages:
    """The images and labels of one epoch of a split, at most `limit` of them."""
    import torch

    examples = list(islice(first_epoch(split, limit), limit))
    return LabelledImages(
        torch.from_numpy(np.stack([example["image"] for example in examples])),
        torch.tensor([example["label"] for example in examples]),
    )


def is_image_folder(path: Path) -> bool:
    """Whether the source of a path is ImageFolder: images in subfolders, or images with metadata.jsonl."""
    pattern = "**/*" if (path / METADATA).is_file() else "*/*"
    return path.is_dir() and any(file.suffix.lower() in SUFFIXES for file in path.glob(pattern))


def image_files(path: Path) -> list[Path]:
    """The image itself, or the images of a folder and its subfolders, in the order of their names."""
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    return [file for file in files if file.suffix.lower() in SUFFIXES]


def scaled(values: np.ndarray, standardize: bool) -> np.ndarray:
    return ((values - 0.5) / 0.5 if standardize else values).astype(np.float32)
