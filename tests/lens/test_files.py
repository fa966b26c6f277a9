"""Files of the lens have the mode of the umask, like all others: safetensors alone would write them with 0600."""

import os
import stat
from pathlib import Path

import torch

from regard.lens import SparseAutoencoder, TunedLens
from regard.lens.recorded import StoredActivations


def test_files_have_the_mode_of_the_umask(tmp_path: Path, make_model) -> None:
    umask = os.umask(0o027)
    try:
        (tmp_path / ".sae.safetensors.part").touch(0o600)  # of a process that was killed
        SparseAutoencoder(4, 8, k=2).save(tmp_path / "sae.safetensors")
        TunedLens(make_model()).save(tmp_path / "lens.safetensors")
        StoredActivations(tmp_path).keep("x", torch.zeros(2))
    finally:
        os.umask(umask)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(("sae.safetensors", "lens.safetensors", "x.safetensors"), 0o640)
