"""Models and training runs as folders: `model` saves, loads, imports and exports, `folder` writes all or nothing."""

from regard.checkpoint.folder import CheckpointError
from regard.checkpoint.model_folder import export, load, save

__all__ = ["CheckpointError", "export", "load", "save"]
